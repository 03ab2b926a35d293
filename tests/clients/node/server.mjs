// The server under test and the questions to it. The Python test that runs these files starts it.

import assert from "node:assert/strict";

export const url = process.env.RAYSTREAM_URL;
export const baseURL = `${url}/v1`;
export const model = "pydoc-chat";
export const detector = "pydoc-detector";
// The same model with room for one running request, so that it is easily full.
export const narrow = "narrow";

export const manyTokens = 2000;

/** What the model says of `name`, by heart. */
export const name = "os.path.join";
export const answer = process.env.RAYSTREAM_ANSWER;

/** A question that the model answers by heart. */
export function about(what, options = {}) {
  const messages = [{ role: "user", content: `What does ${what} do?` }];
  return { model, messages, temperature: 0, ...options };
}

/** A question whose answer goes on nearly to the model's last position. */
export function endless(model) {
  return about(name, { model, max_tokens: manyTokens, ignore_eos: true });
}

/** Calls a method of the narrow model's replica: see `HeldGenerator`. */
export async function observe(method, query = {}) {
  const address = `${url}/window/${method}?${new URLSearchParams({ model: narrow, ...query })}`;
  const response = await fetch(address, { signal: AbortSignal.timeout(30_000) });
  if (!response.ok) throw new Error(`${method}: ${response.status}`);
  return response.json();
}

/** Runs a function while answers of the narrow model begin, but don't end. */
export async function whileHeld(run) {
  await observe("hold");
  try {
    await run();
  } finally {
    await observe("let_go");
  }
  await observe("wait_until_running", { num_running: 0 });
}

/** Checks that a function which leaves a stream of the narrow model frees its place. */
export async function assertFrees(leave) {
  const before = await observe("num_steps");
  await whileHeld(async () => {
    await leave();
    await observe("wait_until_admitted", { num_requests: 0 });
  });
  const steps = (await observe("num_steps")) - before;
  assert.ok(steps > 0 && steps < manyTokens, `${steps} steps`);
}
