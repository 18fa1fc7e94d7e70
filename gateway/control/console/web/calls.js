// View "Calls": the calls that ended last, with filters; each opens to its life.

import {ask, tell} from "./actions.js";
import {button, choices, clock, el, fillChoices, labelled, LongList, say, seconds} from "./dom.js";
import {calls, wantCalls} from "./store.js";

const NAMES = ["serial", "ended", "request_id", "tenant", "class", "model", "engine", "outcome", "status", "reason", "queue",
  "ttft", "total", "prompt_tokens", "completion_tokens", "cached_tokens", "held_tokens", "predicted_wait", "affinity_tokens",
  "shaped_tokens", "attempts", "stream", "settled", "route", "trace_id", "kind", "got"];
const AT = Object.fromEntries(NAMES.map((name, at) => [name, at]));
const KINDS = ["", "", "more", "more", "more", "", "more", "more"];  // of the cells; a narrow window leaves out "more"
const COLOURS = {answered: "good", refused: "bad", failed: "bad", caller: "warn"};
const FILTERS = ["tenant", "class", "model", "outcome", "engine"];

export function callsView() {
  const fields = Object.fromEntries(FILTERS.map((name) => [name, choices([], "any")]));
  const slow = el("input"), find = el("input"), found = el("span", "faint small"), life = el("section", "card");
  slow.type = "number"; slow.min = 0; slow.step = .1; slow.size = 5;
  find.type = "search";
  life.hidden = true;
  life.tabIndex = -1;
  life.setAttribute("aria-label", "Life of the call");
  const head = el("div", "call head small faint", ...["ended", "tenant", "class", "model", "engine", "caller got", "TTFT", "total"].map(
    (name, at) => el("span", KINDS[at], name)));
  const narrow = matchMedia("(max-width: 760px)");
  const list = new LongList("Calls that ended, the newest first", () => 2, make, fill);
  narrow.addEventListener("change", () => list.later());
  const hold = button("Hold still", () => {
    held = !held;
    say(hold, held ? "Go on" : "Hold still");
    hold.setAttribute("aria-pressed", held);
    draw();
  });
  const node = el("section", "", el("h2", "", "Calls that ended"),
    el("div", "controls", ...FILTERS.map((name) => labelled(name, fields[name])), labelled("slower than, s", slow),
      labelled("find", find), hold, button("Save as CSV", save), found), head, list.node, life);
  let shown = [], held = false, chosen = 0;
  for (const field of [...Object.values(fields), slow, find]) field.addEventListener("input", () => draw(true));

  function matches() {
    const wanted = FILTERS.filter((name) => fields[name].value).map((name) => [AT[name], fields[name].value]);
    const least = slow.value === "" ? 0 : Number(slow.value), words = find.value.trim().toLowerCase();
    return (row) => wanted.every(([at, value]) => row[at] === value) && row[AT.total] >= least && (!words ||
      (row[AT.request_id] + " " + row[AT.reason] + " " + row[AT.trace_id]).toLowerCase().includes(words));
  }
  function draw(asked) {
    if (held && !asked) return;
    for (const name of FILTERS) {
      const seen = new Set();
      for (const row of calls.rows) { seen.add(row[AT[name]]); if (seen.size > 500) break; }
      seen.delete("");
      fillChoices(fields[name], [...seen].sort(), "any");
    }
    const is = matches();
    shown = calls.rows.filter(is).reverse();
    say(found, shown.length + " of " + calls.rows.length + " calls");
    list.show(shown.map((row) => [row[0], row]));
  }
  function make(serial) {
    const row = el("button", "call");
    row.type = "button";
    for (const kind of KINDS) row.append(el("span", kind));
    row.addEventListener("click", () => open(serial));
    return el("div", "", row);
  }
  function fill(holder, serial, row) {
    const cells = holder.firstChild.children;
    holder.firstChild.setAttribute("aria-pressed", serial === chosen);
    [clock(row[AT.ended]), row[AT.tenant] || "-", row[AT.class] || "-", row[AT.model] || "-", row[AT.engine] || "-",
      row[AT.got], seconds(row[AT.ttft] || null), seconds(row[AT.total])].forEach((text, at) => say(cells[at], text));
    cells[5].className = COLOURS[row[AT.kind]];
    cells[5].title = row[AT.reason];
  }
  async function open(serial) {
    const row = calls.rows.find((each) => each[0] === serial);
    if (!row) return;
    chosen = serial;
    for (const each of list.node.querySelectorAll(".call")) each.setAttribute("aria-pressed", "false");
    try {
      const steps = JSON.parse(await ask("GET", "/calls/" + serial));
      if (chosen !== serial) return;
      life.replaceChildren(...lifeOf(Object.fromEntries(NAMES.map((name, at) => [name, row[at]])), steps));
      life.hidden = false;
      life.focus();
    } catch (failed) { tell(failed.message, "bad"); }
  }
  function save() {
    const lines = [NAMES.join(","), ...shown.map((row) => row.map(cell).join(","))];
    const link = el("a");
    link.href = URL.createObjectURL(new Blob([lines.join("\r\n") + "\r\n"], {type: "text/csv"}));
    link.download = "calls.csv";
    link.click();
    URL.revokeObjectURL(link.href);
  }
  return {node, draw: () => draw(false), shown() { wantCalls(); list.later(); }};
}

// A spreadsheet takes what begins so for a formula: the apostrophe makes it a text.
export function cell(value) {
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? "'" + value : String(value);
  return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
}

function lifeOf(it, steps) {
  const track = el("div", "track"), whole = it.total || .001;
  track.setAttribute("role", "img");
  track.setAttribute("aria-label", "waited " + seconds(it.engine ? it.queue : it.total) + " of " + seconds(it.total));
  const part = (kind, from, to) => {
    const made = el("div", kind);
    made.style.left = 100 * from / whole + "%";
    made.style.width = Math.max(0, 100 * (to - from) / whole) + "%";
    track.append(made);
  };
  const first = it.ttft || it.total;
  part("queue", 0, it.engine ? it.queue : it.total);
  if (it.engine) { part("prefill", it.queue, first); part("answer", first, it.total); }
  const key = (kind, text) => el("span", "entry", el("span", "key " + kind), " " + text + " ");
  return [el("h3", "", "Life of " + it.request_id + ", which came at " + clock(it.ended - it.total)), track, el("p", "small", key("queue", "in the gateway"),
    key("prefill", "at the engine, until its first byte"), key("answer", "answer")),
    el("dl", "life", ...steps.flatMap((step) => [el("dt", "", step.name + (step.at ? " at " + seconds(step.at) : "")), el("dd", "", step.words)]))];
}
