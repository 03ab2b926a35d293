import assert from "node:assert/strict";
import { test } from "node:test";
import { moduleOf } from "./page.mjs";

const { isFollowed } = await moduleOf("following");

test("going up, however little, ends the following", () => {
  assert.equal(isFollowed(true, -3, 3), false);
  assert.equal(isFollowed(true, -400, 400), false);
});

test("coming to the end begins it again, and being on the way there does not", () => {
  assert.equal(isFollowed(false, 200, 300), false);
  assert.equal(isFollowed(false, 260, 40), true);
  assert.equal(isFollowed(false, 10, -70), true); // below the end stands the page's foot
});

test("a page that the browser scrolls up because it has become shorter is followed on", () => {
  assert.equal(isFollowed(true, -500, 0), true);
  assert.equal(isFollowed(true, -500, -70), true);
});

test("growing while nobody scrolls changes nothing", () => {
  assert.equal(isFollowed(true, 0, 900), true);
  assert.equal(isFollowed(false, 0, 900), false);
});
