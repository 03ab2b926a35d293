import assert from "node:assert/strict";
import { test } from "node:test";
import { moduleOf } from "./page.mjs";

const { newTurn } = await moduleOf("answer");
const { append, matcher, newConversation, show, shownOf, titleOf, versionsOf } = await moduleOf("tree");

const asked = (text) => newTurn("user", text);
const answered = (text) => newTurn("assistant", text);
const texts = (conversation) => shownOf(conversation).map(({ text }) => text);

/** A conversation of two questions, whose first answer was had again and whose first question was edited. */
function branched() {
  const it = newConversation({ model: "m" });
  const turns = Object.fromEntries(["q1", "a1", "q2", "a2"].map((name) => [name, (name[0] === "q" ? asked : answered)(name)]));
  append(it, "", [turns.q1, turns.a1, turns.q2, turns.a2]);
  turns.again = answered("a1 again");
  append(it, turns.q1.id, [turns.again]);
  turns.edited = asked("q1 edited");
  append(it, "", [turns.edited, answered("a3")]);
  return { it, ...turns };
}

test("what was added last is shown, with all that comes before it", () => {
  const { it } = branched();
  assert.deepEqual(texts(it), ["q1 edited", "a3"]);
  assert.equal(it.turns.length, 7);
});

test("another version comes back with what followed it", () => {
  const { it, q1, a1, again, edited } = branched();
  assert.deepEqual(versionsOf(it, q1), [q1, edited]);
  show(it, q1);
  assert.deepEqual(texts(it), ["q1", "a1 again"]);
  assert.deepEqual(versionsOf(it, again), [a1, again]);
  show(it, a1);
  assert.deepEqual(texts(it), ["q1", "a1", "q2", "a2"]);
});

test("the title is the first question's first line, unless its user has named it", () => {
  const it = newConversation({});
  assert.equal(titleOf(it), "");
  append(it, "", [asked("  What is this?\nIt is long.")]);
  assert.equal(titleOf(it), "What is this?");
  it.title = "Mine";
  assert.equal(titleOf(it), "Mine");
  const long = newConversation({});
  append(long, "", [asked("word ".repeat(40))]);
  assert.match(titleOf(long), /^(word ){11}word…$/);
});

test("a text is found by all words of a query, in any case and order", () => {
  const isFound = matcher(" Paths  JOIN ");
  assert.equal(isFound("join two paths"), true);
  assert.equal(isFound("join two strings"), false);
});
