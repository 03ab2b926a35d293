import assert from "node:assert/strict";
import { test } from "node:test";
import { load, moduleOf } from "./page.mjs";

load("vendor/markdown-it.js");
const { blocksOf, htmlOf, isRendered } = await moduleOf("markdown");

test("a text is rendered up to 2,000 lines and 40,000 characters", () => {
  assert.equal(isRendered("|\n".repeat(1_999)), true);
  assert.equal(isRendered("|\n".repeat(2_000)), false);
  assert.equal(isRendered("x".repeat(40_000)), true);
  assert.equal(isRendered("x".repeat(40_001)), false);
});

test("the blocks of a long text are the text, end with lines, and cut no pair of surrogates", () => {
  for (const text of ["one line\n".repeat(9_000), "x".repeat(100_000), `x${"🙂".repeat(30_000)}`, ""]) {
    const blocks = blocksOf(text);
    assert.equal(blocks.join(""), text);
    assert.ok(blocks.every((block) => block.length <= 8_001 && block.isWellFormed()));
  }
  assert.ok(blocksOf("one line\n".repeat(9_000)).every((block) => block.endsWith("\n")));
});

test("HTML in a text is escaped before the purifier sees it", () => {
  for (const text of [
    "<script>1</script>", "<img src=x onerror=1>", "```\n<b>\n```", "`<b>`", "| a |\n|---|\n| <b> |", "[<b>](https://x.test)",
  ]) {
    assert.doesNotMatch(htmlOf(text), /<(script|img|b)\b/, text);
  }
});

test("no picture is loaded, and no text becomes a link by its look", () => {
  assert.doesNotMatch(htmlOf("![stolen](https://elsewhere.example/a.png)"), /<img/);
  assert.doesNotMatch(htmlOf("os.path me@there.test"), /<a/);
  assert.match(htmlOf("https://there.test"), /<a href="https:\/\/there.test"/);
});

test("headings begin below the page's own, and a column's place is no style", () => {
  assert.match(htmlOf("# Title"), /<h3>Title<\/h3>/);
  assert.match(htmlOf("###### Title"), /<h6>/);
  const table = htmlOf("| a |\n|--:|\n| 1 |");
  assert.match(table, /<td align="right">/);
  assert.doesNotMatch(table, /style=/);
});
