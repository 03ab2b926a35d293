import assert from "node:assert/strict";
import { test } from "node:test";
import { moduleOf } from "./page.mjs";

const { meaningOf } = await moduleOf("shortcuts");
const OUTSIDE = { isTyping: false, isOff: false, numTabs: 4 };

test("a letter is a shortcut outside of text boxes only", () => {
  for (const key of ["e", "r", "c", "n", "/", "?"]) {
    assert.deepEqual(meaningOf({ key }, OUTSIDE), { press: key });
    assert.equal(meaningOf({ key }, { ...OUTSIDE, isTyping: true }), null);
    assert.equal(meaningOf({ key }, { ...OUTSIDE, isOff: true }), null);
  }
  assert.equal(meaningOf({ key: "x" }, OUTSIDE), null);
});

test("the browser's own shortcuts stay the browser's", () => {
  for (const held of ["ctrlKey", "metaKey", "altKey", "isComposing"]) {
    assert.equal(meaningOf({ key: "n", [held]: true }, OUTSIDE), null);
  }
});

test("a digit shows a tab that there is", () => {
  assert.deepEqual(meaningOf({ key: "1" }, OUTSIDE), { tab: 0 });
  assert.deepEqual(meaningOf({ key: "4" }, OUTSIDE), { tab: 3 });
  assert.equal(meaningOf({ key: "5" }, OUTSIDE), null);
  assert.equal(meaningOf({ key: "0" }, OUTSIDE), null);
});

test("Escape leaves a text box, and stops the answer outside of all but the message's, whatever is turned off", () => {
  for (const isOff of [false, true]) {
    const meaning = (now) => meaningOf({ key: "Escape" }, { ...OUTSIDE, isOff, ...now });
    assert.deepEqual(meaning({ isTyping: true }), { leave: true });
    assert.deepEqual(meaning({ isTyping: true, isMessage: true }), { press: "Escape" });
    assert.deepEqual(meaning({}), { press: "Escape" });
  }
});
