// Frame of the console: its views, its theme, the token.

import {el, say} from "./dom.js";
import {connect, entries, onChange, onState, setToken} from "./store.js";
import {show as showText} from "./actions.js";
import {nowView} from "./now.js";
import {callsView} from "./calls.js";
import {policyView} from "./policy.js";
import {tenantsView} from "./tenants.js";

const $ = (id) => document.getElementById(id);
const VIEWS = {now: ["Now", nowView], calls: ["Calls", callsView], policy: ["Policy", policyView], tenants: ["Tenants", tenantsView]};
const THEMES = ["system", "dark", "light"];
const made = {};
let shown = "", runbook = "", state = ["", ""];

for (const [name, [title]] of Object.entries(VIEWS)) {
  const link = el("a", "", title);
  link.href = "#" + name;
  $("views").append(link);
}

function show() {
  const wanted = location.hash.slice(1);
  if (/^weir[a-z]+$/.test(wanted)) { runbook = wanted; openRunbook(); }  // an alert's link
  const name = wanted in VIEWS ? wanted : "now";
  if (name === shown) return;
  if (!made[name]) {
    made[name] = VIEWS[name][1]();
    $("shown").append(made[name].node);
  }
  for (const [each, view] of Object.entries(made)) view.node.hidden = each !== name;
  for (const link of $("views").children) {
    if (link.hash === "#" + name) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  document.title = VIEWS[name][0] + " - Weir";
  shown = name;
  made[name].shown();
  made[name].draw();
}

// As soon as the gateway answers: it may ask for the token first.
function openRunbook() {
  if (!runbook || state[0] !== "live") return;
  showText("Runbook: " + runbook, "/runbooks/" + runbook);
  runbook = "";
}

function draw() {
  tellState();
  made[shown].draw();
}

function tellState() {
  const [kind, words] = state, gateway = entries.get("gateway"), policy = entries.get("policy");
  $("ask").hidden = kind !== "asked";
  $("shown").hidden = kind === "asked" && !gateway;
  if (kind === "live" && gateway) {
    say($("state"), (gateway.draining ? "draining, " : "") + "version " + gateway.version + ", policy " + policy.version
      + (policy.error ? ", its file cannot be used" : ""), gateway.draining || policy.error ? "bad" : "");
  } else say($("state"), words || "connecting", words ? "bad" : "");
}

$("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme || "system") + 1) % 3];
  if (next === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = next;
  $("theme").textContent = "Theme: " + next;
});
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = $("token"), given = field.value;
  field.value = "";
  setToken(given);
});
addEventListener("hashchange", show);
onChange(draw);
onState((kind, words) => { state = [kind, words]; tellState(); openRunbook(); });
show();
connect();
