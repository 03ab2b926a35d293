// Vercel's `ai` through `@ai-sdk/openai-compatible`: objects and calls of tools.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { test } from "node:test";
import { z } from "zod";
import { baseURL, model, name } from "./server.mjs";

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
