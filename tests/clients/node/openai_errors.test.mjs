// `openai` for Node: each refusal throws the SDK's own error, says what is wrong, and is not retried
// where that would be useless.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { about, baseURL, model, name } from "./server.mjs";

const refusals = [
  [about(name, { model: "nobody" }), OpenAI.NotFoundError, 404, "model_not_found", "model"],
  [about(name, { temperature: 9 }), OpenAI.BadRequestError, 400, "invalid_request", "temperature"],
  [about(name, { temperatur: 1 }), OpenAI.BadRequestError, 400, "unknown_parameter", "temperatur"],
  [about("x ".repeat(4000)), OpenAI.BadRequestError, 400, "context_length_exceeded", "messages"],
  [about("x".repeat(2 ** 26)), OpenAI.APIError, 413, "request_too_large", null],
];

for (const [asked, error, status, code, param] of refusals) {
  for (const stream of [false, true]) {
    test(`${code}, ${stream ? "streamed" : "whole"}`, async () => {
      let sent = 0;
      const counted = (...request) => (sent++, fetch(...request));
      const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 2, fetch: counted });
      await assert.rejects(client.chat.completions.create({ ...asked, stream }), (thrown) => {
        assert.ok(thrown instanceof error);
        assert.deepEqual([thrown.status, thrown.code, thrown.param], [status, code, param]);
        assert.ok(thrown.requestID);
        return true;
      });
      assert.equal(sent, 1);
    });
  }
}

test("an unknown model's error names the served models", async () => {
  const client = new OpenAI({ baseURL, apiKey: "none" });
  await assert.rejects(client.models.retrieve("nobody"), new RegExp(model));
});
