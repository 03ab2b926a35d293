import assert from "node:assert/strict";
import { test } from "node:test";
import { load, moduleOf } from "./page.mjs";

load("vendor/markdown-it.js");
const { blocksOf, blocksOfHtml, isRendered } = await moduleOf("markdown");
const htmlOf = (text) => blocksOfHtml(text).join("");

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

test("each block of a text is a piece of its own, and what came before does not change as it grows", () => {
  const text = "# A\n\none\n\n- x\n\n  y\n- z\n\n```py\n1\n```\n\n> q\n\n| a |\n|---|\n| 1 |\n\nend";
  const blocks = blocksOfHtml(text);
  assert.deepEqual(blocks.map((each) => /^<(\w+)/.exec(each)[1]), ["h3", "p", "ul", "pre", "blockquote", "div", "p"]);
  assert.deepEqual(blocksOfHtml(`${text} and more`).slice(0, -1), blocks.slice(0, -1));
});

test("a block of code names its language, and nothing else of its first line", () => {
  assert.match(htmlOf("```Python title=x\n1\n```"), /<code class="language-python">1\n</);
  assert.match(htmlOf("```c++\n1\n```"), /class="language-c\+\+"/);
  assert.match(htmlOf('```"onload=x\n1\n```'), /class="language-&quot;onload=x"/);
  assert.doesNotMatch(htmlOf("```\n1\n```"), /class/);
});

/** The formulas of a text; those of a line of their own are marked. */
const formulas = (text) =>
  [...htmlOf(text).matchAll(/<code class="math( display)?">([^<]*)<\/code>/g)].map(([, own, tex]) => (own ? [tex] : tex));

test("formulas are found by TeX's marks", () => {
  assert.deepEqual(formulas("a $x_1^2$ and \\(y\\), $$z$$ and \\[w\\] b"), ["x_1^2", "y", ["z"], ["w"]]);
  assert.deepEqual(formulas("$$\na\n\n- b\n= c\n$$\n\ntext"), [["a\n\n- b\n= c"]]);
  assert.deepEqual(formulas("text\n\\[ a < b \\]\ntext"), [["a &lt; b"]]);
  assert.deepEqual(formulas("- one\n\n  $$\n  a\n  $$\n- two $b$"), [["a"], "b"]);
  assert.deepEqual(formulas("$a\\$b$"), ["a\\$b"]);
});

test("prices, code and marks that are not closed are no formulas", () => {
  for (const text of [
    "from $5 to $6", "$5-$6", "$ x $", "`$x$`", "```\n$$x$$\n```", "$x", "$$\nx", "\\(x", "$$ $$", "\\[\\]", "\\$x\\$", `$${"x".repeat(3_000)}$`,
  ]) {
    assert.deepEqual(formulas(text), [], text);
  }
});

test("marks without an end don't hold up the page", () => {
  for (const text of ["$x ".repeat(13_000), "\\(".repeat(20_000), "$$\n".repeat(1_900), "$$a\n".repeat(1_900), "\\[".repeat(20_000), "$$".repeat(20_000)]) {
    const begun = process.cpuUsage().user;
    htmlOf(text);
    assert.ok(process.cpuUsage().user - begun < 3_000_000, text.slice(0, 8));
  }
});
