import assert from "node:assert/strict";
import { test } from "node:test";
import { gzipSync } from "node:zlib";
import { moduleOf } from "./page.mjs";

const { embedAll, loadEntries, nearest } = await moduleOf("library");

test("an entry is read with its kind, name, parameters and summary", async () => {
  const lines = "function os.path.join(a, *p): Join paths.\nmodule os: Interfaces.\nclass a.B\n";
  globalThis.fetch = async () => new Response(gzipSync(lines));
  const [join, os, b] = await loadEntries();
  assert.deepEqual(join, {
    text: "function os.path.join(a, *p): Join paths.",
    kind: "function", name: "os.path.join", parameters: "(a, *p)", summary: "Join paths.",
  });
  assert.deepEqual([os.kind, os.parameters, os.summary], ["module", "", "Interfaces."]);
  assert.deepEqual([b.name, b.summary], ["a.B", ""]);
});

test("entries are embedded in batches, in their order", async () => {
  const batches = [];
  globalThis.fetch = async (url, { body }) => {
    const { input } = JSON.parse(body);
    batches.push(input.length);
    const data = input.map((text) => ({
      embedding: Buffer.from(new Float32Array([Number(text), 1]).buffer).toString("base64"),
    }));
    return Response.json({ data, usage: { prompt_tokens: input.length } });
  };
  const entries = Array.from({ length: 1_100 }, (_, at) => ({ text: String(at) }));
  const told = [];
  const { vectors, tokens } = await embedAll("e", entries, (done) => told.push(done));
  assert.deepEqual(vectors.map(([first]) => first), entries.map((_, at) => at));
  assert.equal(tokens, 1_100);
  assert.equal(batches.reduce((sum, each) => sum + each), 1_100);
  assert.equal(told.at(-1), 1_100);
});

test("the nearest entries come first", () => {
  const vectors = [[1, 0], [0, 1], [0.6, 0.8]].map((each) => new Float32Array(each));
  const found = nearest(["x", "y", "xy"], vectors, new Float32Array([0, 1]), 2);
  assert.deepEqual(found.map(({ entry }) => entry), ["y", "xy"]);
});
