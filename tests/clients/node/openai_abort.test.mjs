// `openai` for Node: a client that leaves frees its place at once.

import { test } from "node:test";
import OpenAI from "openai";
import { assertFrees, baseURL, endless, narrow, observe } from "./server.mjs";

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });

async function leave(how) {
  const stream = await client.chat.completions.create({ ...endless(narrow), stream: true });
  for await (const _ of stream) {
    await observe("wait_until_admitted", { num_requests: 1 });
    if (how === "abort") stream.controller.abort();
    break;
  }
}

test("an aborted stream frees its place", () => assertFrees(() => leave("abort")));

test("leaving the loop frees its place", () => assertFrees(() => leave("break")));
