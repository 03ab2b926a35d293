// `openai` for Node: a client that leaves frees its slot at once.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { baseURL, endless, narrow, nearTheEnd, observe } from "./server.mjs";

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });

async function leave(how) {
  const before = await observe("num_steps", { model: narrow });
  const stream = await client.chat.completions.create({ ...endless(narrow), stream: true });
  for await (const _ of stream) {
    await observe("wait_until_running", { model: narrow, num_running: 1 });
    if (how === "abort") stream.controller.abort();
    break;
  }
  await observe("wait_until_running", { model: narrow, num_running: 0 });
  const steps = (await observe("num_steps", { model: narrow })) - before;
  assert.ok(steps > 0 && steps < nearTheEnd, `${steps} steps`);
}

test("an aborted stream frees its slot", () => leave("abort"));

test("leaving the loop frees its slot", () => leave("break"));
