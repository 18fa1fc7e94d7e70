// Trial of an edited policy on the calls just recorded: simulated by the gateway's machine, beside the policy in force.

import {ask, tell} from "./actions.js";
import {button, count, el, labelled, Rows, say, seconds, table} from "./dom.js";
import {eventsOf, headers} from "./store.js";

export function trialView() {
  const text = el("textarea", "policy"), engines = el("input"), profile = el("input"), state = el("p", "small");
  text.rows = 14;
  text.spellcheck = false;
  text.setAttribute("aria-label", "Edited policy");
  engines.type = "number"; engines.min = 1; engines.max = 64; engines.value = 4;
  profile.value = "h100-8b"; profile.size = 12;
  state.setAttribute("role", "status");
  const [node, body] = table(["calls", "offered", "answered: now", "edited", "tokens/s: now", "edited", "TTFT p50: now", "edited", "TTFT p99: now",
    "edited", " not answered: now", " edited"], "Policy in force beside the edited one");
  node.hidden = true;
  const rows = new Rows(body, fill);
  const run = el("button", "strong", "Try it"), cancel = button("Cancel", () => stop && stop.abort());
  const load = button("Take the policy in force", async () => {
    try { text.value = await ask("GET", "/policy/try"); } catch (failed) { tell(failed.message, "bad"); }
  });
  cancel.hidden = true;
  let stop = null;
  const form = el("form", "", text, el("div", "controls", load, labelled("simulated engines", engines), labelled("profile", profile), run, cancel));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (stop) return;
    stop = new AbortController();
    run.disabled = true; cancel.hidden = false;
    say(state, "It begins.", "small");
    try {
      await follow({policy: text.value, engines: Number(engines.value), profile: profile.value}, stop.signal);
    } catch (failed) {
      say(state, failed.name === "AbortError" ? "Cancelled: its process is ended." : failed.message, "small" + (failed.name === "AbortError" ? "" : " bad"));
    }
    stop = null;
    run.disabled = false; cancel.hidden = true;
  });
  async function follow(trial, signal) {
    const answer = await fetch("/policy/try", {method: "POST", headers: {...headers(), "content-type": "application/json"},
      body: JSON.stringify(trial), cache: "no-store", credentials: "omit", signal});
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    let of_ = "";
    for await (const [name, data] of eventsOf(answer)) {
      if (name === "begun") { of_ = count(data.calls) + " calls, which came within " + seconds(Math.max(1, data.seconds)); say(state, "Simulating " + of_ + "."); }
      else if (name === "progress") say(state, "Simulating " + of_ + ": " + data.text);
      else if (name === "failed") say(state, data.text, "small bad");
      else {
        say(state, of_ + ", under the policy in force (now) and the edited one.", "small good");
        node.hidden = false;
        rows.show(data.rows.map((row) => [row[0], row]));
      }
    }
  }
  return el("div", "", el("p", "", "Both policies are simulated on the calls of the last hour that are kept, in virtual time, by a process of the lowest priority on the "
    + "gateway's machine. Nothing is changed: to go by the edited policy, save it as the policy file."), form, state, node);
}

const ALIKE = .02;  // a difference that is no news
const NONE = {offered: 0, ok: 0, tokens: null, ttft_p50: null, ttft_p99: null, endings: []};

function fill(cells, name, [, before, after]) {
  const now = before || NONE, edited = after || NONE;
  say(cells[0], name);
  say(cells[1], count(Math.max(now.offered, edited.offered)));
  const pair = (at, shown, key, more) => {
    const alike = now[key] === null || edited[key] === null || Math.abs(edited[key] - now[key]) <= ALIKE * Math.max(now[key], edited[key]);
    const better = alike ? "" : edited[key] > now[key] === more ? "good" : "bad";
    say(cells[at], shown(now[key]));
    say(cells[at + 1], shown(edited[key]), better);
  };
  pair(2, (value) => count(value), "ok", true);
  pair(4, (value) => value === null ? "-" : count(Math.round(value)), "tokens", true);
  pair(6, seconds, "ttft_p50", false);
  pair(8, seconds, "ttft_p99", false);
  const endings = (it) => it.endings.map(([outcome, calls]) => calls + " " + outcome).join(", ") || "none";
  say(cells[10], endings(now), "text");
  say(cells[11], endings(edited), "text");
}
