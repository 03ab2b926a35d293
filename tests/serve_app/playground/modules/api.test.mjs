import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { moduleOf } from "./page.mjs";

const { ApiError, ask, stream, writeKey } = await moduleOf("api");
const asked = [];

/** Let the server answer so. */
function answers(body, { status = 200, headers = {} } = {}) {
  globalThis.fetch = async (url, sent) => {
    asked.push({ url, ...sent });
    if (body instanceof Error) throw body;
    return new Response(body, { status, headers });
  };
}

const refused = (error) => JSON.stringify({ error });
const { signal } = new AbortController();

async function failure(work) {
  try {
    await work;
  } catch (error) {
    assert.ok(error instanceof ApiError, String(error));
    return error;
  }
  return assert.fail("nothing has failed");
}

/** Read a stream that the server sends so; return what it gave, and its error. */
async function streamed(text, options = {}) {
  answers(text, options);
  const data = [];
  const comments = [];
  const onData = (payload, id) => data.push([payload, id]);
  const onComment = (comment) => comments.push(comment);
  const error = await stream("v1/x", {}, { onData, onComment, signal }).then(() => null, (each) => each);
  return { data, comments, error };
}

beforeEach(() => {
  asked.length = 0;
  writeKey("");
});

test("each refusal is told in words, with what the server has said", async () => {
  for (const [status, error, headers, words] of [
    [401, { message: "no key" }, {}, /The server asks for a key\./],
    [403, { message: "no" }, {}, /to operators only/],
    [429, { message: "Used up." }, { "Retry-After": "7" }, /has used up its limit: try again in 7 s\./],
    [503, { message: "Full.", code: "overloaded" }, { "Retry-After": "3" }, /is full: try again in 3 s\./],
    [503, { message: "None.", code: "x" }, {}, /No replica can answer now: try again in a moment\./],
    [504, { message: "Late." }, {}, /took too long/],
    [400, { message: "Wrong." }, {}, /refused this request/],
    [500, { message: "Broken." }, {}, /The server failed\./],
  ]) {
    answers(refused(error), { status, headers });
    const found = await failure(ask("v1/models"));
    assert.match(found.message, words);
    assert.deepEqual([found.status, found.detail], [status, error.message]);
  }
});

test("a key is sent, and its refusal is told otherwise", async () => {
  writeKey("sk-mine");
  answers(refused({ message: "unknown" }), { status: 401 });
  assert.match((await failure(ask("v1/models"))).message, /does not know this key/);
  assert.equal(asked[0].headers.get("Authorization"), "Bearer sk-mine");
});

test("a proxy's answer that is no JSON is shown as it is", async () => {
  answers("<h1>Bad gateway</h1>", { status: 502 });
  assert.equal((await failure(ask("v1/models"))).detail, "<h1>Bad gateway</h1>");
});

test("a server that can't be reached is told", async () => {
  answers(new TypeError("network"));
  const found = await failure(ask("v1/models"));
  assert.match(found.message, /can't be reached/);
  assert.equal(found.code, "connection_lost");
});

test("a stream gives its events with their ids, and its comments, until it is done", async () => {
  const { data, comments, error } = await streamed(': waiting\n\nid: 1\ndata: {"a": 1}\n\ndata: [DONE]\n\n');
  assert.deepEqual([data, comments, error], [[[{ a: 1 }, "1"]], ["waiting"], null]);
});

test("a stream that ends early, or with an error, keeps what has come and says why", async () => {
  const begun = 'data: {"a": 1}\n\n';
  const late = refused({ message: "Over an hour.", type: "timeout_error" });
  for (const [rest, words, status] of [
    ["", /ended before it was complete/, 0],
    [`data: ${late}\n\n`, /took too long/, 504],
    [`data: ${refused({ message: "The step has failed." })}\n\n`, /The server failed/, 500],
  ]) {
    const { data, error } = await streamed(begun + rest);
    assert.deepEqual(data, [[{ a: 1 }, undefined]]);
    assert.match(error.message, words);
    assert.equal(error.status, status);
  }
});

test("an answer that had ended when it is resumed gives nothing more", async () => {
  assert.deepEqual(await streamed(null, { status: 204 }), { data: [], comments: [], error: null });
});
