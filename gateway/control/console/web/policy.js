// View "Policy": what is in force, its last change, its problems; another policy tried.

import {ask, order, tell} from "./actions.js";
import {button, el, say} from "./dom.js";
import {calls, entries, of, wantCalls} from "./store.js";
import {trialView} from "./trial.js";

export function policyView() {
  const facts = el("p"), problem = el("section", "card"), diff = el("pre", "code"), yaml = el("pre", "code");
  problem.hidden = true;
  for (const each of [diff, yaml]) { each.tabIndex = 0; each.setAttribute("role", "region"); }
  diff.setAttribute("aria-label", "Last change"); yaml.setAttribute("aria-label", "Policy in force");
  const reload = button("Read the file again", () => order("Read the policy file again?", ["Calls under way keep the policy that they came with; waiting calls keep their place.",
    "A file with a mistake changes nothing."], "Read it", "POST", "/policy/reload", "The policy file was read."));
  const node = el("section", "", el("h2", "", "Policy in force"), facts, problem, el("div", "buttons", reload),
    el("h2", "", "Last change"), diff,
    el("h2", "", "Try a policy on the calls just recorded"), trialView(),
    el("div", "buttons", button("Save the calls as a trace", saveTrace)), el("h2", "", "Every field"), yaml);
  let shown = "";

  async function load(version) {
    shown = version;
    try {
      const [text, changes] = await Promise.all([ask("GET", "/policy"), ask("GET", "/policy/diff")]);
      yaml.textContent = text;
      diff.replaceChildren(...changes ? changes.split("\n").map((line) => el("span", line[0] === "+" ? "added" : line[0] === "-" ? "removed" : "", line + "\n")) : ["No change since the start."]);
    } catch (failed) { shown = ""; tell(failed.message, "bad"); }
  }
  return {node, shown() { wantCalls(); }, draw() {
    const policy = entries.get("policy");
    if (!policy) return;
    say(facts, "Version " + policy.version + (policy.file ? " of " + policy.file + ", loaded at " + policy.loaded_at + ", sha256 " + policy.digest : ": no file, " + (policy.origin || "the defaults and the command line"))
      + "; " + policy.reloads + " reloads, " + policy.failures + " that failed.");
    reload.hidden = !policy.file;
    problem.hidden = !policy.error;
    if (policy.error) problem.replaceChildren(el("h3", "bad", "The file cannot be used since " + policy.error_at), el("pre", "", policy.error));
    const version = policy.version + policy.digest;
    if (shown !== version) load(version);
  }};
}

// Azure's columns, which `--trace` reads. Only calls whose tokens are known are in it.
function saveTrace() {
  const lines = calls.rows.filter((row) => row[22]).map((row) => [row[1] - row[12], row[13], Math.max(1, row[14])]).sort((a, b) => a[0] - b[0])
    .map(([began, prompt, answer]) => new Date(began * 1000).toISOString().replace("T", " ").replace("Z", "") + "," + prompt + "," + answer);
  if (!lines.length) { tell("No call with known tokens is kept yet.", "bad"); return; }
  const link = el("a");
  link.href = URL.createObjectURL(new Blob(["TIMESTAMP,ContextTokens,GeneratedTokens\n" + lines.join("\n") + "\n"], {type: "text/csv"}));
  link.download = "calls-trace.csv";
  link.click();
  URL.revokeObjectURL(link.href);
}
