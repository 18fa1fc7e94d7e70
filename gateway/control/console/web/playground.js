// View "Playground": one call or twenty at once, streamed, with what the gateway decided about each.

import {tell} from "./actions.js";
import {choices, el, fillChoices, labelled, say, seconds} from "./dom.js";
import {eventsOf, headers, of} from "./store.js";

export function playgroundView() {
  const model = choices([]), class_ = choices([], "none asked for"), number = choices(["1", "2", "5", "10", "20"]), most = el("input"), key = el("input"), prompt = el("textarea");
  most.type = "number"; most.min = 1; most.max = 4096; most.value = 64;
  key.type = "password"; key.autocomplete = "off";
  prompt.rows = 3; prompt.value = "Why is the river level?";
  const go = el("button", "strong", "Send"), stop = el("button", "", "Stop"), answers = el("div");
  stop.type = "button"; stop.disabled = true;
  answers.setAttribute("aria-live", "off");
  const form = el("form", "", el("div", "controls", labelled("model", model), labelled("class", class_), labelled("calls at once", number), labelled("max_tokens", most), labelled("key of the data port", key)),
    el("p", "", labelled("prompt", prompt)), el("div", "buttons", go, stop));
  let open = null;
  stop.addEventListener("click", () => open && open.abort());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const cards = new Map();
    answers.replaceChildren();
    for (let n = 1; n <= Number(number.value); n++) {
      const card = {node: el("section", "card"), head: el("p", "", "Call " + n + ": waits"), lines: el("p", "small faint"), text: el("pre")};
      card.node.append(card.head, card.lines, card.text);
      cards.set(n, card);
      answers.append(card.node);
    }
    go.disabled = true; stop.disabled = false;
    open = new AbortController();
    try {
      const answer = await fetch("/playground", {method: "POST", headers: {...headers(), "content-type": "application/json"}, credentials: "omit", signal: open.signal,
        body: JSON.stringify({model: model.value, class_name: class_.value, prompt: prompt.value, max_tokens: Number(most.value), calls: Number(number.value), key: key.value})});
      if (!answer.ok) throw new Error((await answer.json()).error.message);
      for await (const [name, data] of eventsOf(answer)) show(cards.get(data.call), name, data);
    } catch (problem) {
      tell(problem.name === "AbortError" ? "Stopped: the calls were cancelled." : problem.message, "bad");
    }
    go.disabled = false; stop.disabled = true;
  });
  return {node: el("section", "", el("h2", "", "Playground"), el("p", "small faint", "Calls go through the data port as a client's do: they count in limits, wait and may be refused. The key stays in this page."), form, answers),
    shown() {}, draw() {
      fillChoices(model, of("model").map(([name]) => name));
      fillChoices(class_, of("class").sort((a, b) => a[1].order - b[1].order).map(([name]) => name), "none asked for");
    }};
}

function show(card, name, data) {
  if (name === "head") {
    card.status = data.status;
    say(card.head, "Call " + data.call + ": " + data.status + ", first byte after " + seconds(data.seconds), data.status < 400 ? "good" : "bad");
    say(card.lines, Object.entries(data.headers).map(([key, value]) => key + ": " + value).join("; "));
  } else if (name === "text") card.text.append(data.text);
  else say(card.head, card.head.textContent + (data.error ? "; failed: " + data.error : "; over after " + seconds(data.seconds)), data.error ? "bad" : card.head.className);
}
