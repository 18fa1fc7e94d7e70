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
    say(cells[8], it.all_keys ? it.keys.join(", ") + (it.all_keys > it.keys.length ? " and " + (it.all_keys - it.keys.length) + " more" : "") : "none", "text");
  });
  return {node: el("section", "", el("h2", "", "Tenants"), shared, node,
    el("p", "small faint", "Counts are since the start; the share is that of the weights, while all compete. A key is shown by the beginning of its SHA-256."),
    el("p", "small", "Keys are made and revoked where the policy is: gateway key add TENANT --policy FILE, gateway key revoke HASH --policy FILE. A running gateway reads the file within a second.")),
  shown() {}, draw() {
    rows.show(of("tenant").sort((a, b) => a[1].order - b[1].order));
    const limits = entries.get("limits") || [];
    say(shared, limits.length ? "Limits of all tenants together: " + limits.map(words).join("; ") : "");
  }};
}

const words = ([kind, what, rate, burst, left]) => rate + " " + kind + (what ? " (" + what + ")" : "") + ": " + count(left) + " of " + count(burst);
