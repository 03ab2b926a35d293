// `openai` for Node: completions, whose prompts have no chat template.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { baseURL, model } from "./server.mjs";

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { model, prompt: "Join two or more", max_tokens: 8, temperature: 0 };

test("a text streamed and whole", async () => {
  const whole = await client.completions.create(asked);
  const chunks = await Array.fromAsync(await client.completions.create({ ...asked, stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole.choices[0].text);
});

test("several prompts are answered in order", async () => {
  const { choices } = await client.completions.create({ ...asked, prompt: ["Join", "Return"] });
  assert.deepEqual(choices.map((choice) => choice.index), [0, 1]);
});
