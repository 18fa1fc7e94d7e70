// The last hour, as the gateway keeps it: calls a second, what waited and ran, and what happened.

import {ask} from "./actions.js";
import {clock, count, el, now as gatewaysNow} from "./dom.js";

const HOUR = 3600, LEAST = 600, KEPT = 360, EVERY = 10000, HIGH = 120, LEFT = 52, RIGHT = 12, TOP = 8, BOTTOM = 20;
const SVG = "http://www.w3.org/2000/svg";
const AT = {at: 0, answered: 1, refused: 2, failed: 3, queued: 4, running: 5, up: 6, engines: 7, classes: 8};
const QUIET = new Set(["notice"]);  // events that are not marked in the charts
const SHOWN = 12;

export class History {
  constructor(changed) {
    this.closed = 0; this.step = 10; this.buckets = []; this.events = []; this.changed = changed;
    this.charts = [
      new Chart("Calls a second", [["answered", "answered"], ["refused", "refused"], ["failed", "failed"]],
        (it) => [it[AT.answered], it[AT.refused], it[AT.failed]].map((calls) => calls / this.step)),
      new Chart("Calls that wait and run, most of each 10 s; engines up, fewest", [["waiting", "queued"], ["running", "running"], ["engines up", "up"]],
        (it) => [it[AT.queued], it[AT.running], it[AT.up]])];
    this.list = el("ol", "events");
    this.none = el("p", "faint small", "Nothing has happened in the last hour.");
    this.node = el("div", "", el("div", "charts", ...this.charts.map((chart) => chart.node)), this.none, this.list);
    new ResizeObserver(() => this.draw()).observe(this.node);
    this.load();
    setInterval(() => this.load(), EVERY);
  }
  async load() {
    if (document.hidden) return;
    try {
      const told = JSON.parse(await ask("GET", "/history?after=" + this.closed));
      if (told.closed < this.closed) { this.closed = 0; this.buckets = []; this.load(); return; }  // another gateway
      this.closed = told.closed; this.step = told.step; this.events = told.events;
      this.buckets = [...this.buckets, ...told.buckets].slice(-KEPT);
      this.draw();
      this.changed();
    } catch { /* the stream of events tells that the gateway does not answer */ }
  }
  ofClass(name) { return this.buckets.map((it) => it[AT.classes][name] || [0, 0, 0]); }
  draw() {
    const now = gatewaysNow(), events = this.events.filter((event) => event[0] > now - HOUR).sort((a, b) => a[0] - b[0]);
    const marked = events.filter((event) => !QUIET.has(event[2]));
    const kept = this.buckets.length ? now - this.buckets[0][AT.at] + this.step : 0, span = Math.min(HOUR, Math.max(LEAST, kept));
    for (const chart of this.charts) chart.draw(this.buckets, marked, now, span);
    this.none.hidden = events.length > 0;
    this.list.replaceChildren(...events.slice(-SHOWN).reverse().map((event) =>
      el("li", event[1], el("time", "faint", clock(event[0])), " ", el("span", "", event[3]))));
  }
}

// A chart with axes: time in minutes of the last hour, and values from 0 on.
class Chart {
  constructor(title, lines, values) {
    this.lines = lines; this.values = values;
    this.svg = made("svg", {class: "chart", role: "img"});
    this.title = title;
    this.key = el("p", "small faint", title + ": ", ...lines.flatMap(([name, kind]) => [el("span", "entry", el("span", "key line-" + kind), " " + name), " "]));
    this.node = el("figure", "card", this.key, this.svg);
  }
  draw(buckets, events, now, span) {
    const wide = Math.max(260, this.node.clientWidth - 26), inner = wide - LEFT - RIGHT, high = HIGH - TOP - BOTTOM;
    const values = buckets.map((bucket) => this.values(bucket)), most = nice(Math.max(1, ...values.flat()));
    const x = (at) => LEFT + inner * (1 - (now - at) / span), y = (value) => TOP + high * (1 - value / most);
    const parts = [];
    for (const share of [0, .5, 1]) {
      parts.push(made("line", {class: "grid", x1: LEFT, x2: wide - RIGHT, y1: y(share * most), y2: y(share * most)}));
      parts.push(text(short(share * most), {x: LEFT - 6, y: y(share * most) + 4, "text-anchor": "end"}));
    }
    const tick = span > HOUR / 2 ? 600 : span > HOUR / 4 ? 300 : 120;
    for (let at = Math.ceil((now - span) / tick) * tick; at <= now; at += tick) {
      parts.push(made("line", {class: "grid", x1: x(at), x2: x(at), y1: TOP, y2: TOP + high}));
      parts.push(text(clock(at).slice(0, 5), {x: x(at), y: HIGH - 5, "text-anchor": "middle"}));
    }
    for (const event of events.filter((each) => each[0] >= now - span)) {
      const mark = made("line", {class: "event " + event[1], x1: x(event[0]), x2: x(event[0]), y1: TOP, y2: TOP + high});
      const title = made("title", {});
      title.textContent = clock(event[0]) + " " + event[3];
      mark.append(title);
      parts.push(mark);
    }
    this.lines.forEach(([, kind], line) => {
      const points = buckets.map((bucket, at) => [x(bucket[AT.at]), y(values[at][line])]).filter(([across]) => across >= LEFT);
      if (points.length) parts.push(made("polyline", {class: "line-" + kind, points: points.map((point) => point.map((each) => each.toFixed(1)).join(",")).join(" ")}));
    });
    this.svg.setAttribute("viewBox", "0 0 " + wide + " " + HIGH);
    this.svg.setAttribute("width", wide);
    this.svg.setAttribute("height", HIGH);
    const last = values[values.length - 1];
    this.svg.setAttribute("aria-label", this.title + (last ? ": now " + this.lines.map(([name], at) => short(last[at]) + " " + name).join(", ")
      + "; at most " + this.lines.map(([name], at) => short(Math.max(...values.map((each) => each[at]))) + " " + name).join(", ") : ": nothing yet"));
    this.svg.replaceChildren(...parts);
  }
}

function made(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function text(words, attributes) {
  const node = made("text", attributes);
  node.textContent = words;
  return node;
}

const short = (value) => value >= 100 ? count(Math.round(value)) : String(Math.round(value * 10) / 10);

// The next number of 1, 2, 5 and their tens.
function nice(value) {
  const ten = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((each) => each * ten).find((each) => each >= value);
}
