import assert from "node:assert/strict";
import { test } from "node:test";
import { moduleOf } from "./page.mjs";

const { age, readBatches } = await moduleOf("batches");

const answering = (status, body) => {
  globalThis.fetch = async () => new Response(JSON.stringify(body), { status });
};
const signal = new AbortController().signal;

test("an age is told in the largest unit that it fills", () => {
  const told = [-5, 0, 59.9, 60, 3_599, 3_600, 86_399, 86_400, 10 * 86_400].map(age);
  assert.deepEqual(told, ["0 s", "0 s", "59 s", "1 min", "59 min", "1 h", "23 h", "1 d", "10 d"]);
});

test("a server that keeps no batches has none to show", async () => {
  for (const status of [403, 404]) {
    answering(status, { error: { message: "No." } });
    assert.equal(await readBatches(signal), null);
  }
});

test("another failure is shown, and the next reading finds the batches", async () => {
  answering(503, { error: { message: "The disk is full.", code: "jobs_unavailable" } });
  const { data, error } = await readBatches(signal);
  assert.deepEqual(data, []);
  assert.equal(error.detail, "The disk is full.");
  answering(200, { data: [{ id: "batch_1" }], has_more: true });
  assert.deepEqual(await readBatches(signal), { data: [{ id: "batch_1" }], hasMore: true, error: null });
});
