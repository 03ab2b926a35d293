// The entries of Python's standard library, and their vectors, which a served model makes.

import { ask } from "./api.js";

const FILE = "playground/standard_library.gz";
const BATCH = 512;
const ENTRY = /^(\S+) ([\w.]+)(\(.*?\))?(?:: (.*))?$/;

/** @typedef {{text: string, kind: string, name: string, parameters: string, summary: string}} Entry */

/** @returns {Promise<Entry[]>} */
export async function loadEntries() {
  const answer = await ask(FILE);
  const text = await new Response(answer.body.pipeThrough(new DecompressionStream("gzip"))).text();
  return text.trimEnd().split("\n").map((line) => {
    const [, kind, name, parameters = "", summary = ""] = ENTRY.exec(line) ?? ["", "", line, "", ""];
    return { text: line, kind, name, parameters, summary };
  });
}

/**
 * Embed texts.
 * @param {string} model
 * @param {string[]} input
 * @returns {Promise<{vectors: Float32Array[], tokens: number}>}
 */
export async function embed(model, input) {
  const body = { model, input, encoding_format: "base64" };
  const answer = await (await ask("v1/embeddings", { body })).json();
  return { vectors: answer.data.map((each) => decoded(each.embedding)), tokens: answer.usage.prompt_tokens };
}

/** @param {string} base64 Float32, little-endian. */
function decoded(base64) {
  const bytes = Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

/**
 * Embed all entries, in batches.
 * @param {string} model
 * @param {Entry[]} entries
 * @param {(done: number) => void} onProgress
 */
export async function embedAll(model, entries, onProgress) {
  const vectors = [];
  let tokens = 0;
  const begun = performance.now();
  for (let start = 0; start < entries.length; start += BATCH) {
    const batch = entries.slice(start, start + BATCH).map(({ text }) => text);
    const found = await embed(model, batch);
    vectors.push(...found.vectors);
    tokens += found.tokens;
    onProgress(vectors.length);
  }
  return { vectors, tokens, seconds: (performance.now() - begun) / 1000 };
}

/**
 * Return the entries nearest to a vector, the best first.
 * @param {Entry[]} entries
 * @param {Float32Array[]} vectors Of length 1, one for each entry.
 * @param {Float32Array} query
 * @param {number} count
 */
export const nearest = (entries, vectors, query, count) =>
  vectors
    .map((vector, index) => ({ entry: entries[index], score: dot(vector, query) }))
    .sort((one, other) => other.score - one.score)
    .slice(0, count);

/** @param {Float32Array} one @param {Float32Array} other */
function dot(one, other) {
  let sum = 0;
  for (let index = 0; index < one.length; index += 1) sum += one[index] * other[index];
  return sum;
}
