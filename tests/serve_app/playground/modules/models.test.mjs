import assert from "node:assert/strict";
import { test } from "node:test";
import { moduleOf } from "./page.mjs";

const { actionsOf, factsOf, pauseMs, placeholdersOf, wakingRequest } = await moduleOf("models");

const SAMPLING = { temperature: 0.7, top_p: 1, top_k: 20, min_p: 0, repetition_penalty: 1.1, max_tokens: null };
const MODEL = {
  id: "m", task: "generate", state: "running", failure: null, max_model_len: 2048, accepts_images: true, labels: null,
  default_sampling: SAMPLING,
  footprint: { num_parameters: 3_154_000, weight_bytes: 6 * 2 ** 20, dtype: "bfloat16", device: "A GPU" },
};

test("the list is asked for again soon while a model loads, and now and then afterwards", () => {
  const soon = pauseMs([]);
  for (const state of ["down", "scaling"]) assert.equal(pauseMs([MODEL, { ...MODEL, state }]), soon);
  for (const state of ["running", "asleep", "failed"]) assert.ok(pauseMs([{ ...MODEL, state }]) > 2 * soon);
});

test("empty boxes tell the model's defaults, and its length where it has no limit of its own", () => {
  const found = placeholdersOf(MODEL);
  assert.deepEqual(
    [found.temperature, found.top_k, found.repetition_penalty, found.max_tokens, found.presence_penalty, found.seed],
    ["0.7", "20", "1.1", "up to 2048", "0", "random"],
  );
  assert.equal(placeholdersOf({ ...MODEL, default_sampling: { ...SAMPLING, max_tokens: 100 } }).max_tokens, "up to 100");
});

test("nothing is told of a model that is not known yet but its state", () => {
  const loading = {
    ...MODEL, state: "down", max_model_len: null, accepts_images: null, default_sampling: null, footprint: null,
  };
  assert.deepEqual(placeholdersOf(loading), {});
  assert.deepEqual(placeholdersOf(undefined), {});
  assert.deepEqual(factsOf(loading), [["State", "loading"]]);
});

test("a model's facts have units", () => {
  assert.deepEqual(Object.fromEntries(factsOf(MODEL)), {
    State: "ready", Context: "2,048 tokens", Size: "3.15M parameters", Weights: "6 MiB, bfloat16", Device: "A GPU",
    Reads: "text and pictures",
  });
});

test("each kind of model has a smallest request that wakes it", () => {
  for (const task of ["generate", "classify", "embed"]) {
    const { path, body } = wakingRequest({ id: "m", task });
    assert.ok(path);
    assert.equal(body.model, "m");
  }
});

test("operators are offered what changes something, and the pin first", () => {
  const offered = (state, pinned, going_to_sleep) => actionsOf({ state, pinned, going_to_sleep }).map(([action]) => action);
  assert.deepEqual(offered("running", false, false), ["pin", "sleep"]);
  assert.deepEqual(offered("running", false, true), ["pin", "wake"]);
  for (const state of ["asleep", "scaling", "down", "failed"]) assert.deepEqual(offered(state, false, false), ["pin"]);
  const lightly = { state: "asleep", pinned: false, going_to_sleep: false, replicas: [{}] };
  assert.deepEqual(actionsOf(lightly).map(([action]) => action), ["pin", "sleep"]);
  for (const state of ["running", "asleep", "scaling"]) assert.deepEqual(offered(state, true, false), ["unpin"]);
});
