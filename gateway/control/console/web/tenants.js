// View "Tenants": what each has used, its share, what its limits have left, its keys.

import {count, el, Rows, say, share, table} from "./dom.js";
import {entries, of} from "./store.js";

export function tenantsView() {
  const [node, body] = table(["tenant", "calls", "answered", "tokens", "weight", "share", " classes", " limits: left of burst", " keys"], "Tenants");
  const shared = el("p"), rows = new Rows(body, (cells, name, it) => {
    say(cells[0], name);
    say(cells[1], count(it.ended));
    say(cells[2], share(it.ended ? it.answered / it.ended : null), it.ended && it.answered < it.ended * .9 ? "bad" : "");
    say(cells[3], count(it.tokens));
    say(cells[4], String(it.weight));
    say(cells[5], share(it.share));
    say(cells[6], (it.class || "default") + (it.best_class ? ", at best " + it.best_class : "") + (it.models.length ? "; models " + it.models.join(", ") : ""), "text");
    cells[7].className = "text";
    cells[7].replaceChildren(...it.limits.length ? it.limits.map((limit) => el("div", limit[4] < 1 ? "bad" : "", words(limit))) : ["none asked for yet"]);
    fillKeys(cells[8], it);
  });
  const [bill, lines] = table(["provider", " tenant", " model", "tokens", "money", "a million tokens"], "Money"), budgets = el("p");
  const bills = new Rows(lines, (cells, key, [provider, tenant, model, tokens, money]) => {
    say(cells[0], provider);
    say(cells[1], tenant, "text");
    say(cells[2], model, "text");
    say(cells[3], count(tokens));
    say(cells[4], money.toFixed(2));
    say(cells[5], tokens ? (money / tokens * 1e6).toFixed(2) : "-");
  });
  const outside = el("section", "", el("h2", "", "Money"), budgets, bill);
  return {node: el("section", "", el("h2", "", "Tenants"), shared, node, outside,
    el("p", "small faint", "Counts are since the start; the share is that of the weights, while all compete. A key is shown by the beginning of its SHA-256; gateway key add TENANT --policy FILE makes one.")), shown() {}, draw() {
    rows.show(of("tenant").sort((a, b) => a[1].order - b[1].order));
    const limits = entries.get("limits") || [];
    say(shared, limits.length ? "Limits of all tenants together: " + limits.map(words).join("; ") : "");
    const providers = of("provider");
    outside.hidden = !providers.length;
    say(budgets, providers.filter(([, it]) => it.budgets.length).map(([name, it]) => name + ": " + it.budgets.map(([window, spent, reserved, budget]) =>
      spent.toFixed(2) + " spent and " + reserved.toFixed(2) + " reserved of " + budget.toFixed(2) + " a " + window).join(", ")).join("; "));
    bills.show(providers.flatMap(([name, it]) => it.spent.map((row) => [[name, ...row].slice(0, 3).join(" "), [name, ...row]])));
  }};
}

const words = ([kind, what, rate, burst, left]) => rate + " " + kind + (what ? " (" + what + ")" : "") + ": " + count(left) + " of " + count(burst);

function fillKeys(cell, it) {
  const more = it.all_keys - it.keys.length, now = [it.all_keys, ...it.keys].join();
  if (cell.now === now) return;  // a selection of a hash stays
  cell.now = now;
  cell.className = "text";
  cell.replaceChildren(...it.all_keys ? it.keys.map((hash) => el("div", "", hash)) : [el("div", "", "none")], ...more ? [el("div", "", "and " + more + " more")] : []);
}
