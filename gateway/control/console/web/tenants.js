// View "Tenants": what each has used, its share, what its limits have left, its keys.

import {ask, sure, tell} from "./actions.js";
import {button, count, el, Rows, say, share, table} from "./dom.js";
import {entries, of} from "./store.js";

export function tenantsView() {
  const [node, body] = table(["tenant", "calls", "answered", "tokens", "weight", "share", " classes", " limits: left of burst", " keys"], "Tenants");
  const made = el("section", "card"), how = el("p", "small");
  made.hidden = true;
  made.tabIndex = -1;
  made.setAttribute("aria-label", "New key");
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
    fillKeys(cells[8], name, it, made);
  });
  const [bill, lines] = table(["provider", " tenant", " model", "tokens", "money"], "Money"), budgets = el("p");
  const bills = new Rows(lines, (cells, key, [provider, tenant, model, tokens, money]) => {
    say(cells[0], provider);
    say(cells[1], tenant, "text");
    say(cells[2], model, "text");
    say(cells[3], count(tokens));
    say(cells[4], money.toFixed(2));
  });
  const outside = el("section", "", el("h2", "", "Providers"), budgets, bill);
  return {node: el("section", "", el("h2", "", "Tenants"), made, shared, node, outside,
    el("p", "small faint", "Counts are since the start; the share is that of the weights, while all compete. A key is shown by the beginning of its SHA-256."),
    how), shown() {}, draw() {
    rows.show(of("tenant").sort((a, b) => a[1].order - b[1].order));
    const limits = entries.get("limits") || [];
    say(shared, limits.length ? "Limits of all tenants together: " + limits.map(words).join("; ") : "");
    const providers = of("provider");
    outside.hidden = !providers.length;
    say(budgets, providers.map(([name, it]) => name + ": " + it.budgets.map(([window, spent, reserved, budget]) =>
      spent.toFixed(2) + " spent and " + reserved.toFixed(2) + " reserved of " + budget.toFixed(2) + " a " + window).join(", ")).join("; "));
    bills.show(providers.flatMap(([name, it]) => it.spent.map((row) => [[name, ...row].slice(0, 3).join(" "), [name, ...row]])));
    say(how, may() ? "" : "Keys are made and revoked here where the gateway has an admin token and a policy file; else by gateway key add TENANT --policy FILE.");
  }};
}

const may = () => entries.get("gateway")?.keys;
const words = ([kind, what, rate, burst, left]) => rate + " " + kind + (what ? " (" + what + ")" : "") + ": " + count(left) + " of " + count(burst);

// Made again only when the keys have changed: whoever stands on a button of it stays there.
function fillKeys(cell, name, it, made) {
  const now = [may(), it.all_keys, ...it.keys].join();
  if (cell.now === now) return;
  cell.now = now;
  cell.className = "text";
  const more = it.all_keys - it.keys.length, parts = it.keys.map((hash) => {
    const revoked = button("Revoke", () => revoke(name, hash));
    revoked.setAttribute("aria-label", "Revoke key " + hash + " of " + name);
    return el("div", "", hash + " ", may() ? revoked : null);
  });
  if (more) parts.push(el("div", "", "and " + more + " more"));
  if (!it.all_keys) parts.push(el("div", "", "none"));
  if (may()) {
    const add = button("New key", () => make(name, made));
    add.setAttribute("aria-label", "New key of " + name);
    parts.push(add);
  }
  cell.replaceChildren(...parts);
}

const path = (name) => "/tenants/" + encodeURIComponent(name) + "/keys";

async function make(name, made) {
  if (!await sure("Make a key of " + name + "?", ["Whoever has it calls as " + name + ", within its limits and share. It is shown once, here.",
    "Calls under way are not touched."], "Make it")) return;
  try {
    const told = JSON.parse(await ask("POST", path(name)));
    const key = el("code", "key-shown", told.key);
    const done = button("I have it", () => { made.replaceChildren(); made.hidden = true; }, "strong");
    const copy = navigator.clipboard ? button("Copy", () => navigator.clipboard.writeText(told.key).then(() => tell("The key is in the clipboard."),
      (failed) => tell(failed.message, "bad"))) : null;
    made.replaceChildren(el("h3", "", "Key of " + name + ", not shown again"), el("p", "", key),
      el("p", "small", "Its hash begins with " + told.hash + ". It is sent as Authorization: Bearer KEY."),
      told.problem ? el("p", "bad", "It is not in force yet. " + told.problem) : null, el("p", "buttons", copy, done));
    made.hidden = false;
    made.focus();
  } catch (failed) { tell(failed.message, "bad"); }
}

async function revoke(name, hash) {
  if (!await sure("Revoke key " + hash + " of " + name + "?", ["New calls with it are answered 401 from then on. It cannot be brought back.",
    "Calls under way go on: those that run are not cut off, those that wait keep their place."], "Revoke it")) return;
  try {
    const told = JSON.parse(await ask("DELETE", path(name) + "/" + hash));
    if (told.problem) tell("The key is out of the file, but still in force: " + told.problem, "bad"); else tell("The key " + hash + " of " + name + " is revoked.");
  } catch (failed) { tell(failed.message, "bad"); }
}
