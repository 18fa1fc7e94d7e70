// Orders, through the same HTTP API as the command line. Each is asked about first, with what it does to calls.

import {el} from "./dom.js";
import {entries, headers} from "./store.js";

const $ = (id) => document.getElementById(id);

export function tell(text, kind) {
  const told = el("p", kind || "", text);
  $("told").append(told);
  setTimeout(() => told.remove(), 12000);
}

function sure(title, sentences, yes) {
  $("sure-title").textContent = title;
  $("sure-text").replaceChildren(...sentences.map((text) => el("p", "", text)));
  $("sure-yes").textContent = yes;
  const dialog = $("sure");
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), {once: true}));
}

export async function ask(method, path, body) {
  const answer = await fetch(path, {method, headers: body ? {...headers(), "content-type": "application/json"} : headers(),
    body: body && JSON.stringify(body), cache: "no-store", credentials: "omit"});
  const text = await answer.text();
  if (answer.ok) return text;
  let words = text;
  try { words = JSON.parse(text).error.message; } catch { /* it is no error of ours */ }
  throw new Error(words || path + " answered " + answer.status);
}

// A text of the gateway's in a dialog: an engine's log, a runbook.
export async function show(title, path, atEnd) {
  try {
    const text = await ask("GET", path);
    $("text-title").textContent = title;
    $("text-body").textContent = text || "(nothing)";
    $("text").showModal();
    if (atEnd) $("text-body").scrollTop = $("text-body").scrollHeight;
  } catch (problem) { tell(problem.message, "bad"); }
}

export function showLog(profile, sidecar) {
  return show("Log of " + profile + "@" + sidecar, "/sidecars/" + encodeURIComponent(sidecar) + "/models/"
    + encodeURIComponent(profile) + "/logs?lines=500", true);
}

export async function order(title, sentences, yes, method, path, done) {
  if (!await sure(title, sentences, yes)) return false;
  try {
    await ask(method, path);
    tell(done);
    return true;
  } catch (problem) {
    tell(problem.message, "bad");
    return false;
  }
}

export function drainEngine(id) {
  const it = entries.get("engine/" + id), path = "/engines/" + id.split("/").map(encodeURIComponent).join("/") + "/drain";
  if (it.draining) {
    return order("End the drain of " + it.name + "?", ["It gets new calls again at once."], "End the drain", "DELETE", path, it.name + " gets calls again.");
  }
  return order("Drain " + it.name + "?", ["It gets no new calls. The " + it.calls + " calls that run on it finish there; none is cut off.",
    "Calls that wait go to other engines of their models; where there is none they are refused with 503."], "Drain it", "POST", path,
    it.name + " gets no new calls.");
}

export function drainGateway() {
  if (entries.get("gateway").draining) {
    return order("End the drain of this gateway?", ["/readyz and /health answer 200 again, so balancers send calls."], "End the drain", "DELETE", "/drain", "The drain has ended.");
  }
  const running = [...entries].filter(([key]) => key.startsWith("class/")).reduce((sum, [, it]) => sum + it.running + it.queued, 0);
  return order("Drain this gateway?", ["/readyz and /health answer 503, so balancers send calls elsewhere. Calls that still come are served.",
    "The " + running + " calls that run or wait go on; none is cut off."], "Drain it", "POST", "/drain", "Balancers are told to go elsewhere.");
}

const ORDERS = {
  ensure: ["Load", "Another model may be put to sleep to make room for it, once its calls have ended.", "is being made ready."],
  sleep: ["Put to sleep", "It gets no new calls; those that run on it finish first. Calls that come for it wake it again.", "goes to sleep."],
};

export function orderModel(sidecar, profile, what) {
  const engine = entries.get("sidecar/" + sidecar).models.find((model) => model.profile === profile)?.engine;
  const [name, effect, done] = ORDERS[what], running = engine && entries.get("engine/" + engine);
  const now = running ? ["Now " + running.calls + " calls run on it."] : [];
  return order(name + " " + profile + " on " + sidecar + "?", [effect, ...now], name, "POST",
    "/sidecars/" + encodeURIComponent(sidecar) + "/models/" + encodeURIComponent(profile) + "/" + what, profile + " " + done);
}
