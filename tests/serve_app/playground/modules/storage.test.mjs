import assert from "node:assert/strict";
import { test } from "node:test";
import { moduleOf } from "./page.mjs";

const { browserStorage, tabStorage } = await moduleOf("storage");

test("what is written is read again, and an empty text removes it", () => {
  for (const storage of [browserStorage, tabStorage]) {
    assert.equal(storage.read("name"), "");
    storage.write("name", "text");
    assert.equal(storage.read("name"), "text");
    storage.write("name", "");
    assert.equal(storage.read("name"), "");
  }
});

test("a browser that is full still has what it kept before", () => {
  const kept = new Map([["text", "before"]]);
  const value = {
    getItem: (name) => kept.get(name) ?? null,
    removeItem: (name) => void kept.delete(name),
    setItem: () => { throw new Error("The quota is exceeded."); },
  };
  Object.defineProperty(globalThis, "sessionStorage", { configurable: true, value });
  assert.equal(tabStorage.write("text", "after"), false);
  assert.equal(tabStorage.read("text"), "after");
  assert.equal(kept.get("text"), "before");
});

test("a browser that blocks or is full keeps what is written until the page is left", () => {
  const denied = { configurable: true, get: () => { throw new Error("Access is denied."); } };
  const full = { configurable: true, value: { getItem: () => "old", removeItem: () => {}, setItem: denied.get } };
  for (const state of [denied, full]) {
    Object.defineProperty(globalThis, "localStorage", state);
    assert.equal(browserStorage.write("theme", "dark"), false);
    assert.equal(browserStorage.read("theme"), "dark");
  }
});
