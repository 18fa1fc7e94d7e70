// All that the gateway has told: entries by key, and the calls that ended last. One stream of events brings both.

import {setClock} from "./dom.js";

export const entries = new Map();
export const calls = {rows: [], last: 0, wanted: false};
const KEPT = 10000, SLACK = 1000;
const watchers = [];
let token = "", open = null, pause = 1000, drawing = false, told = () => {};

export function onChange(watcher) { watchers.push(watcher); }
export function onState(teller) { told = teller; }
export function setToken(given) { token = given; connect(); }
export const headers = () => token ? {authorization: "Bearer " + token} : {};

export function of(kind) {
  const found = [];
  for (const [key, entry] of entries) if (key.startsWith(kind + "/")) found.push([key.slice(kind.length + 1), entry]);
  return found;
}

export function wantCalls() {
  if (calls.wanted) return;
  calls.wanted = true;
  connect();
}

function changed() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; for (const watcher of watchers) watcher(); });
}

function take(name, data) {
  if (name === "entries") {
    setClock(data.at);
    if (data.whole) {
      const began = data.set.gateway.began;
      if (calls.of && calls.of !== began) { calls.rows = []; calls.last = 0; if (calls.wanted) connect(); }  // another gateway
      calls.of = began;
      entries.clear();
    }
    for (const key of data.gone) entries.delete(key);
    for (const key in data.set) entries.set(key, data.set[key]);
  } else if (name === "calls") {
    for (const row of data) calls.rows.push(row);
    calls.last = data[data.length - 1][0];
    if (calls.rows.length > KEPT + SLACK) calls.rows = calls.rows.slice(-KEPT);
  }
  changed();
}

// The events of an answer: their names and data.
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const [first, second] = part.split("\n");
      if (second) yield [first.slice(7), JSON.parse(second.slice(6))];
    }
  }
}

export async function connect() {
  if (open) open.abort();
  const mine = open = new AbortController();
  const path = calls.wanted ? "/events?calls=" + calls.last : "/events";
  try {
    const answer = await fetch(path, {headers: headers(), cache: "no-store", credentials: "omit", signal: mine.signal});
    if (answer.status === 401) { told("asked", token ? "this is not the admin token" : "the admin token is wanted"); return; }
    if (!answer.ok) throw new Error(path + " answered " + answer.status);
    told("live", "");
    pause = 1000;
    for await (const [name, data] of eventsOf(answer)) if (open === mine) take(name, data);  // not what an older stream has left
    throw new Error("the gateway has ended the stream");
  } catch (problem) {
    if (mine.signal.aborted) return;
    told("lost", "no answer: " + problem.message);
    setTimeout(() => { if (open === mine) connect(); }, pause);
    pause = Math.min(10000, pause * 2);
  }
}
