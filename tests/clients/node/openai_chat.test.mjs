// `openai` for Node: conversations, whole and streamed.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { about, answer, baseURL, detector, model, name, narrow } from "./server.mjs";

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const ask = (options) => client.chat.completions.create(about(name, options));
const texts = (completion) => completion.choices.map((choice) => choice.message.content);

test("a whole answer", async () => {
  const whole = await ask();
  assert.deepEqual(texts(whole), [answer]);
  assert.equal(whole.choices[0].finish_reason, "stop");
  const { prompt_tokens, completion_tokens, total_tokens } = whole.usage;
  assert.equal(total_tokens, prompt_tokens + completion_tokens);
});

test("a streamed answer joins to the whole one", async () => {
  const whole = await ask();
  const stream = await ask({ stream: true, stream_options: { include_usage: true } });
  const chunks = await Array.fromAsync(stream);
  const last = chunks.pop();
  const deltas = chunks.map((chunk) => chunk.choices[0].delta);
  assert.equal(deltas.map((delta) => delta.content ?? "").join(""), answer);
  assert.equal(deltas.filter((delta) => delta.role !== undefined).length, 1);
  assert.equal(chunks.at(-1).choices[0].finish_reason, "stop");
  assert.deepEqual(last.choices, []);
  assert.deepEqual(last.usage, whole.usage);
});

test("the SDK's stream reader gives the same answer", async () => {
  const stream = client.chat.completions.stream(about(name));
  let seen = "";
  stream.on("content", (delta) => (seen += delta));
  assert.deepEqual(texts(await stream.finalChatCompletion()), [answer]);
  assert.equal(seen, answer);
});

test("a seed repeats an answer and n gives different ones", async () => {
  const loose = { temperature: 2, max_tokens: 16, seed: 5 };
  const [once] = texts(await ask(loose));
  const again = texts(await ask({ ...loose, n: 3 }));
  assert.equal(again[0], once);
  assert.equal(new Set(again).size, 3);
});

test("each token has logprobs", async () => {
  const { choices, usage } = await ask({ logprobs: true, top_logprobs: 3 });
  assert.equal(choices[0].logprobs.content.length, usage.completion_tokens);
  for (const told of choices[0].logprobs.content) {
    assert.equal(told.top_logprobs.length, 3);
    assert.equal(told.top_logprobs[0].token, told.token);
  }
});

test("a stop string ends the text before it", async () => {
  const stop = answer.split(" ")[3];
  const { choices } = await ask({ stop: [stop] });
  assert.equal(choices[0].message.content, answer.slice(0, answer.indexOf(stop)));
  assert.equal(choices[0].finish_reason, "stop");
});

test("a truncated answer says so", async () => {
  const { choices, usage } = await ask({ max_completion_tokens: 3 });
  assert.equal(choices[0].finish_reason, "length");
  assert.equal(usage.completion_tokens, 3);
});

test("the request's id is returned", async () => {
  const { request_id } = await client.chat.completions
    .create(about(name, { max_tokens: 1 }), { headers: { "X-Request-Id": "mine-1" } })
    .withResponse();
  assert.equal(request_id, "mine-1");
});

test("the models are listed and shown", async () => {
  const listed = await Array.fromAsync(client.models.list());
  assert.deepEqual(listed.map((served) => served.id), [model, narrow, detector, "pydoc-search"]);
  assert.equal((await client.models.retrieve(model)).id, model);
});
