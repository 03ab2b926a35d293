// Vercel's `ai` through `@ai-sdk/openai-compatible`: text, whole and streamed.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";
import assert from "node:assert/strict";
import { test } from "node:test";
import {
  answer,
  baseURL,
  manyTokens,
  model,
  name,
  narrow,
  nearTheEnd,
  observe,
} from "./server.mjs";

const raystream = createOpenAICompatible({ name: "raystream", baseURL, includeUsage: true });
const prompt = `What does ${name} do?`;

test("generateText gives the whole answer", async () => {
  const { text, finishReason } = await generateText({
    model: raystream(model),
    prompt,
    temperature: 0,
  });
  assert.equal(text, answer);
  assert.equal(finishReason, "stop");
});

test("streamText gives the same text, and the usage", async () => {
  const result = streamText({ model: raystream(model), prompt, temperature: 0 });
  const pieces = await Array.fromAsync(result.textStream);
  assert.equal(pieces.join(""), answer);
  assert.equal(await result.finishReason, "stop");
  const usage = await result.usage;
  assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
  assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
});

test("an aborted streamText frees its slot", async () => {
  const before = await observe("num_steps", { model: narrow });
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
    await observe("wait_until_running", { model: narrow, num_running: 1 });
    controller.abort();
  }
  await observe("wait_until_running", { model: narrow, num_running: 0 });
  const steps = (await observe("num_steps", { model: narrow })) - before;
  assert.ok(steps > 0 && steps < nearTheEnd, `${steps} steps`);
});

test("a refusal is an APICallError that must not be retried", async () => {
  await assert.rejects(generateText({ model: raystream("nobody"), prompt }), (thrown) => {
    assert.ok(APICallError.isInstance(thrown));
    assert.equal(thrown.statusCode, 404);
    assert.equal(thrown.isRetryable, false);
    assert.match(thrown.message, /pydoc-chat/);
    return true;
  });
});
