import assert from "node:assert/strict";
import { test } from "node:test";
import { moduleOf } from "./page.mjs";

const { TIMES, averageRunning, growth, growthBy, lasting, mean, samplesOf, total } = await moduleOf("metrics");

/** A counter's samples, by the process that has counted. */
const counted = (byProcess) =>
  samplesOf(Object.entries(byProcess).map(([name, n]) => `t{replica="${name}"} ${n}`).join("\n"), ["t"]).t;

test("only the metrics that were asked for are read, with their labels", () => {
  const text = '# HELP a_total x\na_total{model="m",code="a\\"b"} 3.0\nb_total 1\na_total 4\nnonsense\n';
  const { a_total: found, c_total: none } = samplesOf(text, ["a_total", "c_total"]);
  assert.deepEqual(found.map(({ value }) => value), [3, 4]);
  assert.deepEqual(found[0].labels, { model: "m", code: 'a\\"b' });
  assert.deepEqual(none, []);
  assert.equal(total(found), 7);
  assert.equal(total(found, { model: "m" }), 3);
});

test("the speed counts processes that were there before", () => {
  assert.equal(growth(counted({ a: 900, b: 10 }), counted({ b: 30 })), 20);
  assert.equal(growth(counted({ b: 30 }), counted({ a: 900, b: 35 })), 5);
  assert.equal(growth(counted({ a: 900, b: 35 }), counted({ a: 910, b: 3 })), 10);
});

test("a counter grows for each value of a label, whatever the process", () => {
  const read = (...counts) =>
    samplesOf(counts.map(([key, replica, n]) => `t{key="${key}",replica="${replica}"} ${n}`).join("\n"), ["t"]).t;
  const before = read(["a", "x", 1], ["a", "y", 2], ["", "x", 5]);
  const now = read(["a", "x", 4], ["a", "y", 4], ["", "x", 6], ["new", "x", 9]);
  assert.deepEqual([...growthBy("key", before, now)], [["a", 5], ["", 1], ["new", 0]]);
});

test("counts do not fall when a process ends or begins again", () => {
  let seen = [];
  for (const reading of [{ a: 5, b: 2 }, { b: 2 }, { a: 1, b: 2 }]) {
    seen = lasting(seen, counted(reading));
    assert.equal(total(seen), 7);
  }
});

test("how many ran is told by the time that they took, however short each one was", () => {
  const [tokens, prefill, whole] = TIMES;
  const read = (...lines) => samplesOf(lines.join("\n"), TIMES);
  const before = read(`${tokens}{model_name="m"} 10`, `${prefill}{model_name="m"} 1`, `${whole}{model_name="m"} 20`,
    `${whole}{model_name="c"} 5`);
  const now = read(`${tokens}{model_name="m"} 14`, `${prefill}{model_name="m"} 2`, `${whole}{model_name="m"} 90`,
    `${whole}{model_name="c"} 6`);
  // A text's time from end to end holds its wait, and comes only once it has ended; a pooler's texts have no other.
  assert.equal(averageRunning(before, now, 10, new Set(["m"])), 0.6);
  assert.equal(averageRunning(now, now, 10, new Set(["m"])), 0);
});

test("the mean of nothing is nothing", () => {
  assert.deepEqual([mean([]), mean([1, 2, 6])], [0, 3]);
});
