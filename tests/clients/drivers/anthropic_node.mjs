// Cells of Anthropic's package for node.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { HELLO, KEY, LEVEL, MODEL, ROOT, SLOW, check, failing, run, times } from "./cells.mjs";

const packages = createRequire(pathToFileURL(`${process.env.WEIR_PACKAGES}/package.json`));
const Anthropic = packages("@anthropic-ai/sdk");

const client = new Anthropic({ baseURL: ROOT, apiKey: KEY, maxRetries: 0, timeout: 30_000 });
const brief = { model: MODEL, messages: HELLO, max_tokens: 8, temperature: 0 };
const tools = [{ name: LEVEL.name, description: LEVEL.description, input_schema: LEVEL.parameters }];
const schema = {
  type: "object",
  properties: { river: { type: "string" }, level: { type: "integer" } },
  required: ["river", "level"],
};

await run({
  async messages() {
    const answer = await client.messages.create({ ...brief, system: "Be brief." });
    check(answer.content[0].text && answer.usage.output_tokens === 8, answer);
  },
  async stream() {
    const whole = await client.messages.create(brief);
    const stream = client.messages.stream(brief);
    let text = "";
    stream.on("text", (piece) => (text += piece));
    const last = await stream.finalMessage();
    check(text === whole.content[0].text && last.usage.output_tokens === 8, last);
  },
  async tools() {
    const tool_choice = { type: "tool", name: "level_of" };
    const answer = await client.messages.create({ ...brief, max_tokens: 60, tools, tool_choice });
    check(answer.content[0].type === "tool_use" && answer.content[0].name === "level_of", answer);
  },
  async structured() {
    const output_config = { format: { type: "json_schema", schema } };
    const answer = await client.messages.create({ ...brief, max_tokens: 100, output_config });
    check(Number.isInteger(JSON.parse(answer.content[0].text).level), answer);
  },
  async count_tokens() {
    const asked = { model: MODEL, messages: HELLO, system: "Be brief." };
    const counted = await client.messages.countTokens(asked);
    const { usage } = await client.messages.create({ ...asked, max_tokens: 1 });
    check(counted.input_tokens === usage.input_tokens + (usage.cache_read_input_tokens ?? 0), [counted, usage]);
  },
  async errors() {
    const unknown = await failing(() => client.messages.create({ ...brief, model: "no-such-model" }));
    check(unknown instanceof Anthropic.NotFoundError, unknown);
    const hasty = client.withOptions({ apiKey: SLOW });
    const refused = await failing(() => times(3, () => hasty.messages.create({ ...brief, max_tokens: 1 })));
    check(refused instanceof Anthropic.RateLimitError && Number(refused.headers.get("retry-after")) >= 1, refused);
    const patient = client.withOptions({ apiKey: SLOW, maxRetries: 3 });
    await times(3, () => patient.messages.create({ ...brief, max_tokens: 1 }));
  },
  async cancel() {
    const endless = { ...brief, max_tokens: 4000, stream: true, ignore_eos: true };
    const stream = await client.messages.create(endless);
    for await (const _ of stream) break;
    stream.controller.abort();
  },
});
