// Vercel's `ai` through `@ai-sdk/openai-compatible`: text, objects and calls of tools.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, streamObject, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { test } from "node:test";
import { z } from "zod";
import {
  answer,
  assertFrees,
  baseURL,
  manyTokens,
  model,
  name,
  narrow,
  observe,
} from "./server.mjs";

const raystream = createOpenAICompatible({
  name: "raystream",
  baseURL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const prompt = `What does ${name} do?`;
const schema = z.object({
  sky: z.enum(["clear", "cloudy"]),
  degrees: z.number().int().min(-99).max(99),
});
const asked = { model: raystream(model), prompt, temperature: 0 };

test("generateText gives the whole answer", async () => {
  const { text, finishReason } = await generateText(asked);
  assert.equal(text, answer);
  assert.equal(finishReason, "stop");
});

test("streamText gives the same text, and the usage", async () => {
  const result = streamText(asked);
  const pieces = await Array.fromAsync(result.textStream);
  assert.equal(pieces.join(""), answer);
  assert.equal(await result.finishReason, "stop");
  const usage = await result.usage;
  assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
  assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
});

test("an aborted streamText frees its place", () => assertFrees(async () => {
  const controller = new AbortController();
  const result = streamText({
    model: raystream(narrow),
    prompt,
    temperature: 2,
    maxOutputTokens: manyTokens,
    // This is how the provider sends fields that it does not know.
    providerOptions: { raystream: { ignore_eos: true } },
    abortSignal: controller.signal,
  });
  for await (const _ of result.textStream) {
    // Text that arrived before the abort is still read.
    if (controller.signal.aborted) continue;
    await observe("wait_until_admitted", { num_requests: 1 });
    controller.abort();
  }
}));

test("a refusal is an APICallError that must not be retried", async () => {
  await assert.rejects(generateText({ model: raystream("nobody"), prompt }), (thrown) => {
    assert.ok(APICallError.isInstance(thrown));
    assert.equal(thrown.statusCode, 404);
    assert.equal(thrown.isRetryable, false);
    assert.match(thrown.message, /pydoc-chat/);
    return true;
  });
});

test("generateObject gives an object of the schema", async () => {
  const { object, finishReason } = await generateObject({ ...asked, schema });
  schema.parse(object);
  assert.equal(finishReason, "stop");
});

test("streamObject ends with an object of the schema", async () => {
  const result = streamObject({ ...asked, schema });
  const partial = await Array.fromAsync(result.partialObjectStream);
  assert.deepEqual(partial.at(-1), await result.object);
  schema.parse(await result.object);
});

for (const [how, call] of [
  ["generateText", generateText],
  ["streamText", streamText],
]) {
  test(`${how} calls a tool with what its schema asks for`, async () => {
    const called = [];
    const weather = tool({
      description: "Tell the weather",
      inputSchema: schema,
      execute: async (input) => (called.push(input), "told"),
    });
    const result = await call({ ...asked, tools: { weather }, toolChoice: "required" });
    const toolCalls = await result.toolCalls;
    assert.ok(toolCalls.length > 0);
    assert.equal(toolCalls[0].toolName, "weather");
    schema.parse(called[0]);
    assert.equal(await result.finishReason, "tool-calls");
  });
}
