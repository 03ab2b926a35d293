// `openai` for Node against a full server: a request is refused at once with Retry-After, and its
// retry is served.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { about, baseURL, endless, name, narrow, observe, whileHeld } from "./server.mjs";

test("a retry waits as long as Retry-After says and is served", () => whileHeld(async () => {
  const occupant = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const streams = [];
  for (let i = 0; i < 2; i++) {
    streams.push(await occupant.chat.completions.create({ ...endless(narrow), stream: true }));
  }
  const sent = [];
  const statuses = [];
  let toldSeconds;
  const client = new OpenAI({
    baseURL,
    apiKey: "none",
    maxRetries: 2,
    fetch: async (...request) => {
      sent.push(performance.now());
      const response = await fetch(...request);
      statuses.push(response.status);
      toldSeconds ??= Number(response.headers.get("retry-after"));
      // Make room once the server has refused.
      for (const stream of streams) stream.controller.abort();
      await observe("let_go");
      return response;
    },
  });
  const completion = await client.chat.completions.create(
    about(name, { model: narrow, max_tokens: 4 }),
  );
  assert.deepEqual(statuses, [503, 200]);
  assert.equal(completion.choices[0].finish_reason, "length");
  assert.ok(toldSeconds >= 1);
  // By default, the client would have retried within half a second.
  assert.ok(sent[1] - sent[0] >= toldSeconds * 1000 - 1);
}));
