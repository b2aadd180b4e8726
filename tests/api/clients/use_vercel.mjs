// Vercel's AI SDK, with its providers for OpenAI-compatible servers and for Anthropic's messages.
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const url = process.argv[2] + "/v1";
const TEXT = Array(12).fill("Grüße aus Oslo").join(", "); // long, so that the text comes in several events
const CALL = '<tool_call>\n{"name": "forecast", "arguments": {"city": "Oslo"}}\n</tool_call>';
const JSON_TEXT = '{"city":"Oslo","days":3}';
const compatible = { name: "preheat", baseURL: url, apiKey: "none", supportsStructuredOutputs: true };
const models = [
  createOpenAICompatible({ ...compatible, includeUsage: true }).chatModel("m"),
  createOpenAICompatible({ ...compatible, supportsStructuredOutputs: false }).chatModel("m"),
  createAnthropic({ baseURL: url, apiKey: "none" })("m"),
];
const tools = {
  forecast: tool({
    description: "Forecast the weather.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `Sunny in ${city}`,
  }),
};
const common = { maxRetries: 0 };
const fail = ({ error }) => { throw error; };

async function text() {
  for (const model of models) {
    const answer = await generateText({ ...common, model, prompt: TEXT });
    assert.equal(answer.text, TEXT);
    assert.ok(answer.usage.outputTokens > 3);
  }
}

async function stream() {
  for (const model of models) {
    const answer = streamText({ ...common, model, prompt: TEXT, onError: fail });
    const parts = [];
    for await (const part of answer.textStream) parts.push(part);
    assert.equal(parts.join(""), TEXT);
    assert.ok(parts.length > 3);
  }
}

async function calls() {
  for (const model of models) {
    const asked = { ...common, model, prompt: CALL, tools, stopWhen: stepCountIs(3) };
    const answer = await generateText(asked);
    assert.deepEqual(answer.steps[0].toolCalls[0].input, { city: "Oslo" });
    assert.match(answer.text, /Sunny in Oslo/);
    const streamed = streamText({ ...asked, onError: fail });
    assert.match(await streamed.text, /Sunny in Oslo/);
  }
}

async function json() {
  const output = Output.object({ schema: z.object({ city: z.enum(["Oslo", "Rome"]), days: z.number().int() }) });
  for (const model of models) {
    const answer = await generateText({ ...common, model, prompt: JSON_TEXT, output });
    assert.deepEqual(answer.output, { city: "Oslo", days: 3 });
    const streamed = streamText({ ...common, model, prompt: JSON_TEXT, output, onError: fail });
    assert.deepEqual(await streamed.output, { city: "Oslo", days: 3 });
  }
}

for (const [name, step] of Object.entries({ text, stream, tools: calls, json })) {
  await step();
  console.log(name);
}
