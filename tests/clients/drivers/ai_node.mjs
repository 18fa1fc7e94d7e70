// Cells of Vercel's package `ai`, with its providers for OpenAI's and Anthropic's APIs.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { KEY, LEVEL, MODEL, SLOW, URL, check, failing, run, times } from "./cells.mjs";

const packages = createRequire(pathToFileURL(`${process.env.WEIR_PACKAGES}/package.json`));
const load = async (name) => import(pathToFileURL(packages.resolve(name)));
const ai = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createAnthropic } = await load("@ai-sdk/anthropic");

const over = (apiKey) => createOpenAICompatible({
  name: "here", baseURL: URL, apiKey, includeUsage: true, supportsStructuredOutputs: true,
});
const here = over(KEY);
const brief = { prompt: "Why is the river level?", maxOutputTokens: 8, temperature: 0, maxRetries: 0 };
const model = here(MODEL);
const schema = ai.jsonSchema({
  type: "object",
  properties: { river: { type: "string" }, level: { type: "integer" } },
  required: ["river", "level"],
  additionalProperties: false,
});

await run({
  async chat() {
    const answer = await ai.generateText({ ...brief, model });
    check(answer.text && answer.usage.outputTokens === 8, answer.usage);
  },
  async stream() {
    const whole = await ai.generateText({ ...brief, model });
    const answer = ai.streamText({ ...brief, model });
    let text = "";
    for await (const piece of answer.textStream) text += piece;
    check(text === whole.text, text);
    check((await answer.usage).outputTokens === 8, await answer.usage);
  },
  async tools() {
    const level_of = ai.tool({ description: LEVEL.description, inputSchema: ai.jsonSchema(LEVEL.parameters) });
    const asked = { ...brief, model, maxOutputTokens: 60, tools: { level_of }, toolChoice: "required" };
    const [called] = (await ai.generateText(asked)).toolCalls;
    check(called.toolName === "level_of" && "river" in called.input, called);
  },
  async structured() {
    const output = ai.Output.object({ schema });
    const answer = await ai.generateText({ ...brief, model, maxOutputTokens: 100, output });
    check(Number.isInteger(answer.output.level), answer.output);
  },
  async embeddings() {
    const answer = await ai.embedMany({ model: here.embeddingModel(MODEL), values: ["one", "two"], maxRetries: 0 });
    check(answer.embeddings.length === 2);
  },
  async responses() {
    const provider = createOpenAI({ baseURL: URL, apiKey: KEY });
    check((await ai.generateText({ ...brief, model: provider.responses(MODEL) })).text);
  },
  async messages() {
    const provider = createAnthropic({ baseURL: URL, apiKey: KEY });
    check((await ai.generateText({ ...brief, model: provider(MODEL) })).text);
  },
  async errors() {
    const unknown = await failing(() => ai.generateText({ ...brief, model: here("no-such-model") }));
    check(ai.APICallError.isInstance(unknown) && unknown.statusCode === 404, unknown);
    const slow = over(SLOW)(MODEL);
    const refused = await failing(() => times(3, () => ai.generateText({ ...brief, model: slow })));
    check(ai.APICallError.isInstance(refused) && refused.statusCode === 429, refused);
    check(Number(refused.responseHeaders["retry-after"]) >= 1, refused.responseHeaders);
    await times(3, () => ai.generateText({ ...brief, model: slow, maxRetries: 3 }));
  },
  async cancel() {
    const leaving = new AbortController();
    const endless = { maxOutputTokens: 4000, providerOptions: { here: { ignore_eos: true } } };
    const answer = ai.streamText({ ...brief, ...endless, model, abortSignal: leaving.signal });
    for await (const _ of answer.textStream) leaving.abort();
  },
});
