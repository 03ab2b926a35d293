// `openai` for Node: structured answers and calls of tools. The embedded model was trained for
// neither; only the grammar makes its answers valid.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { about, baseURL, name } from "./server.mjs";

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const Weather = z.object({
  sky: z.enum(["clear", "cloudy"]),
  degrees: z.number().int().min(-99).max(99),
  is_windy: z.boolean(),
});
const tools = [zodFunction({ name: "weather", parameters: Weather })];

test("a parsed answer has the requested shape", async () => {
  const completion = await client.chat.completions.parse(
    about(name, { response_format: zodResponseFormat(Weather, "weather") }),
  );
  Weather.parse(completion.choices[0].message.parsed);
});

test("a streamed answer parses too", async () => {
  const stream = client.chat.completions.stream(
    about(name, { response_format: zodResponseFormat(Weather, "weather") }),
  );
  Weather.parse((await stream.finalChatCompletion()).choices[0].message.parsed);
});

test("a required tool is called, whole and streamed", async () => {
  const asked = about(name, { tools, tool_choice: "required" });
  const whole = await client.chat.completions.create(asked);
  const [call] = whole.choices[0].message.tool_calls;
  assert.equal(whole.choices[0].finish_reason, "tool_calls");
  assert.equal(call.function.name, "weather");
  Weather.parse(JSON.parse(call.function.arguments));
  const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
  const again = streamed.choices[0].message.tool_calls[0];
  assert.deepEqual(JSON.parse(again.function.arguments), JSON.parse(call.function.arguments));
});
