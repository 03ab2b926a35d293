// The server under test and the questions to it. The Python test that runs these files starts it.

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

/** Asks a model's replica: wait_until_running, num_steps. */
export async function observe(method, query) {
  const address = `${url}/window/${method}?${new URLSearchParams(query)}`;
  const response = await fetch(address, { signal: AbortSignal.timeout(30_000) });
  if (!response.ok) throw new Error(`${method}: ${response.status}`);
  return response.json();
}

/** Steps of the engine; a whole endless answer takes all of `manyTokens`. */
export const nearTheEnd = 1900;
