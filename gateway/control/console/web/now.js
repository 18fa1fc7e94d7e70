// View "Now": who is refused and why; classes, models, engines, sidecars.

import {ago, button, clock, count, el, labelled, LongList, now, Rows, say, seconds, share, since, table} from "./dom.js";
import {entries, of} from "./store.js";
import {drainEngine, drainGateway, orderModel, show, showLog} from "./actions.js";
import {History} from "./history.js";

const MODES = {tight: "warn", brownout: "bad", closed: "bad"};
const SVG = "http://www.w3.org/2000/svg", POINTS = 360;

export function nowView() {
  const lines = el("ul", "lines");
  lines.setAttribute("aria-live", "polite");
  lines.setAttribute("aria-label", "What to do now");
  const [classesNode, classesBody] = table(["class", "offered/s", "admitted/s", "refused/s", "failed/s", "answered/s", "running", "queued",
    "wait", "TTFT p50", "p99 of target", "answers in time", "goodput", "last hour"], "Classes");
  const [modelsNode, modelsBody] = table(["model", " mode", "engines", "queued", " waits", "TTFT once sent", "room for calls",
    "spare tokens"], "Models");
  const classes = new Rows(classesBody, fillClass), models = new Rows(modelsBody, fillModel);
  const [mirrorsNode, mirrorsBody] = table(["model route", " side", "ok", "errors", "dropped", "tokens each", "TTFT", " finish reasons"], "Mirrors");
  const mirrors = new Rows(mirrorsBody, fillMirror);
  const mirrored = el("section", "", el("h2", "", "Mirrors"), mirrorsNode,
    el("p", "small faint", "Calls of which copies ran, and these copies, since the start. Tokens and TTFT are means over those that are ok."));
  const narrow = matchMedia("(max-width: 760px)");
  const engines = new LongList("Engines", () => narrow.matches ? 9 : 4, makeEngine, fillEngine);
  narrow.addEventListener("change", () => engines.later());
  const drain = button("Drain this gateway", () => drainGateway());
  const find = el("input"), title = el("h2", "", "Sidecars"), sidecars = el("div"), of_ = el("span", "faint small");
  find.type = "search";
  find.addEventListener("input", () => showEngines());
  const past = new History(() => remember());
  const node = el("section", "", el("h2", "", "What to do now"), lines,
    el("h2", "", "Last hour"), past.node, el("h2", "", "Classes"), classesNode,
    el("p", "small faint", "Rates are of the last 10 s: offered calls came, admitted ones were given an engine; the others count calls that ended. "
      + "Answers in time are a share of the answers, whatever was refused. "
      + "Wait is how long one more call of the class would wait, as predicted. Goodput is tokens a second of answers in time."), el("h2", "", "Models"), modelsNode,
    el("p", "small faint", "Mode is of load shedding in steps, by what engines measure. In mode normal calls are refused one by one: when they would be "
      + "too late, their queue is full or a limit is used up. Wanted engines are those for what was offered of late. TTFT once sent leaves out the wait."),
    mirrored, el("h2", "", "Engines"), el("div", "buttons", drain),
    el("p", "small faint", "KV cache of each: filled is held for calls, the lower edge is what the engine measured, the line is the budget. "
      + "Calls are of those it may run at once: a bound that is learned, and rises while the engine has room, where its entry gives no max_concurrency. "
      + "Calls wait here once either is used up, since those that wait in an engine cannot be put in order."),
    el("div", "controls", labelled("find", find), of_), engines.node, title, sidecars);
  const machines = new Map();
  let shownLines = null, drawn = false;

  function showEngines() {
    const wanted = find.value.trim().toLowerCase();
    const all = of("engine"), found = wanted ? all.filter(([id, it]) =>
      (id + " " + it.name + " " + it.state + " " + (it.breaker || "") + " " + it.models.join(" ")).toLowerCase().includes(wanted)) : all;
    found.sort((a, b) => trouble(b[1]) - trouble(a[1]));
    say(of_, found.length === all.length ? all.length + " engines" : found.length + " of " + all.length + " engines");
    engines.show(found);
  }
  function fillClass(cells, name, it) {
    const now = it.now;
    say(cells[0], name);
    say(cells[1], now.offered.toFixed(1));
    say(cells[2], now.admitted.toFixed(1), now.refused && now.admitted < now.offered ? "bad" : "");
    say(cells[3], now.refused.toFixed(1), now.refused ? "bad" : "");
    say(cells[4], now.failed.toFixed(1), now.failed ? "warn" : "");
    say(cells[5], now.answered.toFixed(1));
    say(cells[6], count(it.running) + (it.most_running === null ? "" : " of " + count(it.most_running)), it.running === it.most_running ? "warn" : "");
    say(cells[7], count(it.queued), it.queued ? "warn" : "");
    say(cells[8], seconds(it.wait));
    say(cells[9], seconds(now.ttft_p50));
    say(cells[10], seconds(now.ttft_p99) + (it.target === null ? "" : " of " + seconds(it.target)), it.target !== null && now.ttft_p99 > it.target ? "bad" : "");
    say(cells[11], share(now.in_time), now.in_time !== null && now.in_time < .99 ? "bad" : "");
    say(cells[12], count(Math.round(now.goodput)));
  }
  function remember() {
    const rows = [...classesBody.children];
    of("class").sort(inOrder).forEach(([name], at) => { if (rows[at]) spark(rows[at].children[13], name, past.ofClass(name), past.step); });
  }

  return {node, shown() { engines.later(); }, draw() {
    const told = entries.get("headline");
    if (told && told !== shownLines) { shownLines = told; fillLines(lines, told); }
    say(drain, entries.get("gateway")?.draining ? "End the drain of this gateway" : "Drain this gateway");
    classes.show(of("class").sort(inOrder));
    if (!drawn) { drawn = true; remember(); }
    models.show(of("model"));
    mirrored.hidden = !of("mirror").length;
    mirrors.show(of("mirror").flatMap(([name, it]) => [["member", "members"], ["copy", "copies for " + it.model]].map(([side, words]) =>
      [name + " " + side, [name, words, it.sides[side]]])));
    showEngines();
    const now = of("sidecar");
    title.hidden = !now.length;
    for (const [id, it] of now) {
      if (!machines.has(id)) { machines.set(id, makeSidecar(id)); sidecars.append(machines.get(id).node); }
      machines.get(id).fill(it);
    }
    for (const [id, machine] of machines) if (!entries.has("sidecar/" + id)) { machine.node.remove(); machines.delete(id); }
  }};
}

const inOrder = (a, b) => a[1].order - b[1].order;
const trouble = (it) => (it.state !== "up" ? 4 : 0) + (it.breaker ? 2 : 0) + (it.draining ? 1 : 0);

// Lines are made once and filled again, so that whoever stands on a button of one stays there.
function fillLines(list, told) {
  while (list.children.length > told.length) list.lastChild.remove();
  told.forEach((it, at) => {
    if (!list.children[at]) {
      list.append(el("li", "", el("p", "what", el("span"), el("span", "since")), el("p", "why"), el("p", "do"), el("p", "buttons")));
    }
    const made = list.children[at], [what, why, change, buttons] = made.children;
    if (made.className !== it.level) made.className = it.level;
    say(what.firstChild, it.what);
    say(what.lastChild, it.since ? " Since " + clock(it.since) + ", " + ago(it.since) + "." : "");
    say(why, it.why ? "Why: " + it.why : "");
    say(change, it.change ? "Do: " + it.change : "");
    const board = entries.get("gateway")?.board, wanted = JSON.stringify([it.engines, it.runbook, it.level, board]);
    if (buttons.dataset.made !== wanted) { buttons.dataset.made = wanted; buttons.replaceChildren(...help(it, board)); }
  });
}

// Where to read on: logs of engines that a sidecar runs, the runbook, the board.
function help(it, board) {
  const more = [];
  for (const name of it.engines || []) {
    const at = name.indexOf("@");
    if (at > 0) more.push(button("Log of " + name, () => showLog(name.slice(0, at), name.slice(at + 1))));
  }
  if (it.runbook) more.push(button("Runbook", () => show("Runbook: " + it.runbook, "/runbooks/" + it.runbook)));
  if (it.level !== "good" && board) more.push(away("Board", board));
  return more;
}

function away(text, address) {
  const link = el("a", "", text);
  link.href = address; link.target = "_blank"; link.rel = "noreferrer";
  return link;
}

function spark(cell, name, points, step) {
  let drawn = cell.firstChild;
  if (!drawn) {
    drawn = document.createElementNS(SVG, "svg");
    drawn.setAttribute("class", "spark");
    drawn.setAttribute("viewBox", "0 0 359 20");
    drawn.setAttribute("preserveAspectRatio", "none");
    drawn.setAttribute("role", "img");
    for (const kind of ["answered", "refused", "failed"]) {
      const made = document.createElementNS(SVG, "polyline");
      made.setAttribute("class", kind);
      drawn.append(made);
    }
    cell.append(drawn);
  }
  const most = Math.max(1, ...points.flat()), sum = (at) => points.reduce((total, point) => total + point[at], 0);
  drawn.setAttribute("aria-label", name + ", last hour: " + sum(0) + " answered, " + sum(1) + " refused, " + sum(2)
    + " failed; at most " + (most / step).toFixed(1) + " a second");
  [...drawn.children].forEach((made, kind) => made.setAttribute("points",
    points.map((point, at) => (POINTS - points.length + at) + "," + (19 - 18 * point[kind] / most).toFixed(1)).join(" ")));
}

function fillModel(cells, id, it) {
  say(cells[0], id);
  cells[1].replaceChildren(el("span", MODES[it.mode] || "", it.mode),
    it.why ? el("span", "small faint", " " + it.why + since(it.since)) : "");
  cells[1].className = "text";
  say(cells[2], it.wanted > it.engines ? it.engines + " of " + it.wanted + " wanted" : String(it.engines), it.wanted > it.engines ? "bad" : "");
  say(cells[3], count(it.queued), it.queued ? "warn" : "");
  say(cells[4], it.queues.map(([name, calls, , wait]) => name + " " + calls + ": " + (it.engines || wait ? seconds(wait) : "any moment")).join("; ") || "-", "text");
  say(cells[5], seconds(it.ttft));
  say(cells[6], count(it.headroom));
  say(cells[7], count(it.spare));
}

function fillMirror(cells, key, [name, words, it]) {
  say(cells[0], name);
  say(cells[1], words, "text");
  say(cells[2], count(it.ok));
  say(cells[3], count(it.error), it.error ? "warn" : "");
  say(cells[4], count(it.dropped));
  say(cells[5], it.tokens === null ? "-" : it.tokens.toFixed(1));
  say(cells[6], seconds(it.ttft));
  say(cells[7], Object.entries(it.finishes).map(([reason, calls]) => reason + " " + count(calls)).join(", ") || "-", "text");
}

function makeEngine(id) {
  const band = el("div", "band", el("div", "held"), el("div", "used"), el("div", "budget"));
  band.setAttribute("role", "img");
  const drain = button("Drain", () => drainEngine(id));
  return el("div", "engine", el("div", "", el("b"), " ", el("span")), band, drain, el("div", "what small faint"));
}

function fillEngine(row, id, it) {
  const [head, band, drain, what] = row.children, [name, state] = head.children;
  say(name, it.name);
  name.title = id;
  const broken = it.breaker ? "breaker " + it.breaker.replace("_", " ") : "";
  say(state, it.state !== "up" ? it.state : it.draining ? "draining" : broken || "up",
    it.state !== "up" || it.breaker ? "bad" : it.draining ? "warn" : "good");
  const most = Math.max(it.capacity, it.budget, it.held, 1);
  const part = (node, value) => { const wide = Math.min(100, 100 * value / most).toFixed(1) + "%"; if (node.style.width !== wide) node.style.width = wide; };
  part(band.children[0], it.held); part(band.children[1], it.used || 0); part(band.children[2], it.budget);
  const words = "held " + count(it.held) + ", measured " + (it.used === undefined ? "nothing yet" : count(it.used)) + ", budget " + count(it.budget) + " tokens";
  band.setAttribute("aria-label", words);
  const numbers = words + "; calls " + it.calls + " of at most " + it.slots + (it.fixed ? "" : " (learned)") + (it.inside ? ", waiting inside " + it.inside[1] : "");
  say(drain, it.draining ? "End drain" : "Drain");
  drain.setAttribute("aria-label", (it.draining ? "End the drain of " : "Drain ") + it.name);
  say(what, numbers + ". " + (it.why ? it.why + since(it.since) + ". " : "") + (it.sampled ? "Not sampled since " + clock(it.sampled) + ". " : "")
    + (it.models.join(", ") || "no model"));
}

// When a model can be called. A start that takes longer than expected says so, and never that it is ready in 0.
function readiness(it) {
  if (it.state === "running" && !it.pending) return "now";
  if (it.ready_in === null) return "-";
  if (it.pending && !it.began) return it.ready_in > 0 ? "in " + seconds(it.ready_in) : "any moment";
  if (!it.began) return "in " + seconds(it.ready_in) + ", once it is wanted";
  const took = Math.max(0, Math.round(now() - it.began));
  return it.ready_in > 0 ? "in " + seconds(it.ready_in) + " (" + seconds(took) + " so far)" : "late: " + seconds(took) + " so far";
}

// One sidecar: made once, then filled, so that whoever stands on a button of it stays there.
function makeSidecar(id) {
  const [wide, body] = table(["model", " state", " ready", " why", " orders"], "Models of sidecar " + id);
  const state = el("span"), refused = el("p", "bad small"), gpus = el("div"), cards = new Map();
  const rows = new Rows(body, (cells, profile, model) => {
    say(cells[0], profile);
    say(cells[1], model.state + (model.pending ? ", " + model.pending : "") + (model.phase ? ": " + model.phase : ""), "text " + (model.state === "error" ? "bad" : model.pending ? "warn" : ""));
    say(cells[2], readiness(model), "text");
    say(cells[3], model.why, "text");
    if (cells[4].firstChild) return;
    cells[4].className = "text";
    cells[4].append(el("div", "buttons", ...[["Load", "ensure"], ["Sleep", "sleep"], ["Log", "log"]].map(([name, order]) => {
      const made = button(name, () => order === "log" ? showLog(profile, id) : orderModel(id, profile, order));
      made.setAttribute("aria-label", name + " " + profile + " of " + id);
      return made;
    })));
  });
  return {node: el("section", "", el("h3", "", id, " ", state), refused, gpus, wide), fill(it) {
    say(state, it.stale ? "no report for 10 s" : it.gpus.length ? "" : "no GPU", it.stale ? "bad small" : "faint small");
    for (const gpu of it.gpus) {
      if (!cards.has(gpu.index)) { cards.set(gpu.index, makeGpu()); gpus.append(cards.get(gpu.index)); }
      fillGpu(cards.get(gpu.index), gpu);
    }
    for (const [index, card] of cards) if (!it.gpus.some((gpu) => gpu.index === index)) { card.remove(); cards.delete(index); }
    say(refused, Object.entries(it.refused).map(([address, why]) => address + ": " + why).join("; "));
    refused.hidden = !refused.textContent;
    rows.show(it.models.map((model) => [model.profile, model]));
  }};
}

// Memory of one GPU: filled is what the sidecar's models hold, the lower edge is in use, as the driver measures it.
function makeGpu() {
  const band = el("div", "band", el("div", "held"), el("div", "used"));
  band.setAttribute("role", "img");
  return el("div", "gpu", el("b"), band, el("div", "what small faint"));
}

function fillGpu(card, it) {
  const [name, band, what] = card.children, held = it.held.reduce((sum, [, size]) => sum + size, 0);
  const wide = (size) => Math.min(100, 100 * size / Math.max(it.total, .1)).toFixed(1) + "%";
  say(name, "GPU " + it.index);
  band.children[0].style.width = wide(held);
  band.children[1].style.width = wide(it.used);
  const words = it.used.toFixed(1) + " of " + it.total.toFixed(1) + " GiB used, " + it.free.toFixed(1) + " free; "
    + (it.held.length ? "held by " + it.held.map(([profile, size]) => profile + " " + size.toFixed(1)).join(", ") : "held by no model");
  band.setAttribute("aria-label", "GPU " + it.index + ": " + words);
  say(what, words + (it.refused ? ". Not used: " + it.refused : ""), it.refused ? "what small bad" : "what small faint");
}
