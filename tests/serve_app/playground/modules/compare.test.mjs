import assert from "node:assert/strict";
import { test } from "node:test";
import { load, moduleOf } from "./page.mjs";

load("vendor/markdown-it.js");
const { turnsOf } = await moduleOf("compare");

test("each side goes on from its own answers, and both from the same questions", () => {
  const rounds = [
    { question: "first?", answers: ["a1", "b1"] },
    { question: "second?", answers: ["a2", "b2"] },
  ];
  assert.deepEqual(turnsOf(rounds, 0, 1), ["first?", "a1", "second?"]);
  assert.deepEqual(turnsOf(rounds, 1, 1), ["first?", "b1", "second?"]);
  assert.deepEqual(turnsOf(rounds, 1, 0), ["first?"]);
});
