import assert from "node:assert/strict";
import { test } from "node:test";
import { moduleOf } from "./page.mjs";

const { csvOf, likeliestColumn, linesOf, rowsOf } = await moduleOf("table");
const { BELOW, decided, resultRows } = await moduleOf("many");
const { NO_TEXTS, textsOf } = await moduleOf("own_texts");

test("lines are texts, without those that are empty", () => {
  assert.deepEqual(linesOf(" one\r\n\n two \rthree\n"), ["one", "two", "three"]);
});

test("CSV is read with quotes, line breaks in cells, and each usual separator", () => {
  for (const [text, rows] of [
    ['a,b\n1,"x, ""y""\nz"\n', [["a", "b"], ["1", 'x, "y"\nz']]],
    ["a;b\r\n1;x,y\r\n", [["a", "b"], ["1", "x,y"]]],
    ["a\tb\r1\t\r", [["a", "b"], ["1", ""]]],
    ["one\n\ntwo", [["one"], ["two"]]],
    ["a,", [["a", ""]]],
    ["", []],
    ['say "hi",b\nc,d', [['say "hi"', "b"], ["c", "d"]]],
    ['"a"b,c\nd,e', [['"a"b', "c"], ["d", "e"]]],
    ['"open,1\nd,e', [['"open', "1"], ["d", "e"]]],
  ]) {
    assert.deepEqual(rowsOf(text), rows, JSON.stringify(text));
  }
});

test("what is written as CSV is read again", () => {
  const rows = [["text", "n"], ['a "quoted", cell', "1"], ["two\nlines", " padded "]];
  assert.deepEqual(rowsOf(csvOf(rows)), rows);
});

test("a text that a spreadsheet would run as a formula is written as a text, and a number stays one", () => {
  const formulas = ['=HYPERLINK("http://evil")', "+1+cmd", "-2+3", "@SUM(A1)", "\t=1"];
  assert.deepEqual(rowsOf(csvOf([formulas])), [formulas.map((text) => `'${text}`)]);
  const plain = ["-1.5", "+3", "-2e-3", "a=b", "0.100000", "x@y.org"];
  assert.deepEqual(rowsOf(csvOf([plain])), [plain]);
  assert.equal(csvOf([[-1, 2]]), "-1,2\r\n");
});

test("the texts of a table are its column of the longest cells, without the names", () => {
  const rows = [["id", "comment"], ["1", "a long comment"], ["2", ""], ["3", "another"]];
  assert.equal(likeliestColumn(rows), 1);
  const found = textsOf({ ...NO_TEXTS, table: { name: "a.csv", rows }, column: 1 });
  assert.deepEqual(found, {
    texts: ["a long comment", "another"], rows: [["1", "a long comment"], ["3", "another"]], names: ["id", "comment"],
  });
  const unnamed = textsOf({ ...NO_TEXTS, table: { name: "a.csv", rows }, column: 0, hasNames: false });
  assert.deepEqual([unnamed.texts, unnamed.names], [["id", "1", "2", "3"], ["column 1", "column 2"]]);
});

test("a label counts from the threshold on, and the rows keep what they were", () => {
  const scored = [[0.9, 0.1], [0.4, 0.6]].map(([yes, no]) => {
    const scores = [{ label: "yes", score: yes }, { label: "no", score: no }].sort((one, other) => other.score - one.score);
    return { label: scores[0].label, scores };
  });
  assert.deepEqual(scored.map((each) => decided(each, 0.6)), ["yes", "no"]);
  assert.deepEqual(scored.map((each) => decided(each, 0.61)), ["yes", BELOW]);
  const rows = resultRows({ texts: [], rows: [["1", "a"], ["2"]], names: ["id", "text"], scored, labels: ["no", "yes"] }, 0.7);
  assert.deepEqual(rows, [
    ["id", "text", "label", "score of no", "score of yes"],
    ["1", "a", "yes", "0.100000", "0.900000"],
    ["2", "", BELOW, "0.600000", "0.400000"],
  ]);
});
