// `openai` for Node: responses, whole and streamed, and calls of functions.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { answer, baseURL, model, name } from "./server.mjs";

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { model, input: `What does ${name} do?`, temperature: 0 };
const weather = {
  type: "function",
  name: "weather",
  strict: true,
  parameters: {
    type: "object",
    properties: { city: { enum: ["Oslo", "Rome"] } },
    required: ["city"],
    additionalProperties: false,
  },
};

test("a whole response", async () => {
  const response = await client.responses.create({ ...asked, store: false });
  assert.equal(response.output_text, answer);
  assert.equal(response.status, "completed");
});

test("a streamed response gives the same text", async () => {
  const stream = client.responses.stream(asked);
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  const final = await stream.finalResponse();
  assert.equal(text, answer);
  assert.equal(final.output_text, answer);
});

test("a required function is called, and its result is read", async () => {
  const first = await client.responses.create({
    ...asked,
    tools: [weather],
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  const [call] = first.output;
  assert.ok(["Oslo", "Rome"].includes(JSON.parse(call.arguments).city));
  const second = await client.responses.create({
    ...asked,
    input: [
      { role: "user", content: asked.input },
      ...first.output,
      { type: "function_call_output", call_id: call.call_id, output: "clear" },
    ],
    tools: [weather],
  });
  assert.ok(second.output.length > 0);
});

test("previous_response_id is refused by name", async () => {
  await assert.rejects(
    client.responses.create({ ...asked, previous_response_id: "resp_1" }),
    (thrown) => thrown.status === 400 && thrown.param === "previous_response_id",
  );
});
