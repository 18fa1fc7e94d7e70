// Cells of OpenAI's package for node.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { HELLO, KEY, LEVEL, MODEL, SLOW, URL, check, failing, run, times } from "./cells.mjs";

const packages = createRequire(pathToFileURL(`${process.env.WEIR_PACKAGES}/package.json`));
const OpenAI = packages("openai");

const client = new OpenAI({ baseURL: URL, apiKey: KEY, maxRetries: 0, timeout: 30_000 });
const brief = { model: MODEL, messages: HELLO, max_tokens: 8, temperature: 0 };
const schema = {
  type: "object",
  properties: { river: { type: "string" }, level: { type: "integer" } },
  required: ["river", "level"],
};

await run({
  async chat() {
    const answer = await client.chat.completions.create(brief);
    check(answer.choices[0].message.content);
    check(answer.usage.completion_tokens === 8, answer.usage);
  },
  async stream() {
    const whole = await client.chat.completions.create(brief);
    const options = { stream: true, stream_options: { include_usage: true } };
    let text = "";
    let usage;
    for await (const chunk of await client.chat.completions.create({ ...brief, ...options })) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    check(text === whole.choices[0].message.content, text);
    check(usage.completion_tokens === 8, usage);
  },
  async tools() {
    const tools = [{ type: "function", function: LEVEL }];
    const answer = await client.chat.completions.create({ ...brief, max_tokens: 60, tools, tool_choice: "required" });
    const [called] = answer.choices[0].message.tool_calls;
    check(called.function.name === "level_of" && "river" in JSON.parse(called.function.arguments), called);
  },
  async structured() {
    const response_format = { type: "json_schema", json_schema: { name: "reading", strict: true, schema } };
    const answer = await client.chat.completions.parse({ ...brief, max_tokens: 100, response_format });
    check(Number.isInteger(answer.choices[0].message.parsed.level), answer);
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model: MODEL, input: ["one", "two"] });
    check(answer.data.length === 2 && answer.data[0].embedding.length > 0);
  },
  async responses() {
    const asked = { model: MODEL, input: "Why?", max_output_tokens: 6 };
    check((await client.responses.create(asked)).output_text);
    const kinds = [];
    for await (const event of await client.responses.create({ ...asked, stream: true })) kinds.push(event.type);
    check(kinds[0] === "response.created" && kinds.at(-1) === "response.completed", kinds);
  },
  async batches() {
    const endpoint = "/v1/chat/completions";
    const line = (custom_id) => JSON.stringify({ custom_id, method: "POST", url: endpoint, body: brief });
    const lines = new File([`${line("a")}\n${line("b")}`], "calls.jsonl");
    const file = await client.files.create({ file: lines, purpose: "batch" });
    let batch = await client.batches.create({ input_file_id: file.id, endpoint, completion_window: "24h" });
    for (const ends = Date.now() + 20_000; batch.status !== "completed" && Date.now() < ends; ) {
      await new Promise((later) => setTimeout(later, 100));
      batch = await client.batches.retrieve(batch.id);
    }
    check(batch.status === "completed", batch);
    const text = await (await client.files.content(batch.output_file_id)).text();
    const found = text.trim().split("\n").map((each) => JSON.parse(each).custom_id);
    check(found.sort().join() === "a,b", found); // in any order, as OpenAI has it
    check((await client.files.delete(file.id)).deleted);
  },
  async errors() {
    const unknown = await failing(() => client.chat.completions.create({ ...brief, model: "no-such-model" }));
    check(unknown instanceof OpenAI.NotFoundError, unknown);
    const hasty = client.withOptions({ apiKey: SLOW });
    const refused = await failing(() => times(3, () => hasty.chat.completions.create({ ...brief, max_tokens: 1 })));
    check(refused instanceof OpenAI.RateLimitError && Number(refused.headers.get("retry-after")) >= 1, refused);
    const patient = client.withOptions({ apiKey: SLOW, maxRetries: 3 });
    await times(3, () => patient.chat.completions.create({ ...brief, max_tokens: 1 }));
  },
  async cancel() {
    const endless = { ...brief, max_tokens: 4000, stream: true, ignore_eos: true };
    const stream = await client.chat.completions.create(endless);
    for await (const _ of stream) break;
    stream.controller.abort();
  },
});
