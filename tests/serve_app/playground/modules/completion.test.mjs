import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { load, moduleOf } from "./page.mjs";

load("vendor/markdown-it.js");
const { KeptDraft, keepDraft, readDraft, undoable } = await moduleOf("completion");

test("a text that grows is written every half second, and once more when it ends", () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const write = mock.method(globalThis.localStorage, "setItem");
  const kept = new KeptDraft(() => {});
  for (let i = 0; i < 300; i++) {
    kept.change({ text: `${"word ".repeat(i)}end` });
    mock.timers.tick(10);
  }
  assert.equal(write.mock.callCount(), 6);
  kept.flush();
  assert.equal(readDraft().text, kept.draft.text);
  const count = write.mock.callCount();
  kept.flush();
  mock.timers.tick(1000);
  assert.equal(write.mock.callCount(), count);
  mock.timers.reset();
  mock.restoreAll();
});

test("of the texts before, the last one stays, and no more than the browser has room for", () => {
  assert.deepEqual(undoable(["a", "b"]), ["a", "b"]);
  assert.deepEqual(undoable([]), []);
  assert.equal(undoable(Array(80).fill("a")).length, 50);
  const large = "x".repeat(400_000);
  assert.deepEqual(undoable(["first", large, large, "last"]), ["first", large, large, "last"]);
  assert.deepEqual(undoable(["first", large, large, large, "last"]), [large, large, "last"]);
  assert.deepEqual(undoable(["first", "x".repeat(2_000_000)]), ["x".repeat(2_000_000)]);
});

test("a full browser keeps the text without those before, or the text of its last write", () => {
  let room = 100;
  const stored = new Map();
  const small = {
    getItem: (name) => stored.get(name) ?? null,
    removeItem: (name) => void stored.delete(name),
    setItem: (name, text) => {
      if (text.length > room) throw new Error("The quota is exceeded.");
      stored.set(name, text);
    },
  };
  Object.defineProperty(globalThis, "localStorage", { configurable: true, value: small });
  assert.equal(keepDraft({ text: "now", before: ["x".repeat(200)] }), true);
  assert.deepEqual(readDraft(), { text: "now", before: [] });
  room = 10;
  assert.equal(keepDraft({ text: "later", before: [] }), false);
  assert.match([...stored.values()].join(), /now/);
});
