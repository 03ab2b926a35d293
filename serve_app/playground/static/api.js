// Requests to the server: the key, errors in words, and streams of Server-Sent Events.

import { createParser } from "./vendor/parse.js";
import { tabStorage } from "./storage.js";

const KEY = "raystream-key";
const DONE = "[DONE]";

/** The server's address, without a slash at the end; a route prefix belongs to it. */
export const SERVER = new URL(".", document.baseURI).href.replace(/\/$/, "");

/** @returns {string} The key of this browser tab; "" if none was given. */
export const readKey = () => tabStorage.read(KEY);

/** @param {string} key Kept until the browser tab is closed; "" forgets it. */
export const writeKey = (key) => tabStorage.write(KEY, key);

/** A request that failed. Its message is what a reader is told; `detail` is what the server said. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, code?: string, detail?: string, retryAfterS?: number | null}} found
   */
  constructor(message, { status = 0, code = "", detail = "", retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.detail = detail;
    this.retryAfterS = retryAfterS;
  }
}

const UNAVAILABLE = { overloaded: "The server is full", jobs_unavailable: "The server can't use its disk" };
const STATUS_OF_TYPE = { overloaded_error: 503, rate_limit_error: 429, timeout_error: 504 };

/**
 * Return an error in words.
 * @param {number} status 0 for an error inside a stream.
 * @param {{message?: string, type?: string, code?: string}} error What the server said.
 * @param {number | null} retryAfterS
 */
function inWords(status, error, retryAfterS) {
  const known = status || STATUS_OF_TYPE[error.type ?? ""] || 500;
  const detail = error.message ?? "";
  const found = { status: known, code: error.code ?? "", detail, retryAfterS };
  const later = retryAfterS ? `: try again in ${retryAfterS} s.` : ": try again in a moment.";
  switch (known) {
    case 401:
      return new ApiError(
        readKey() ? "The server does not know this key." : "The server asks for a key.", found);
    case 403:
      return new ApiError(
        readKey() ? "This key lacks the right to do that." : "The server allows that to operators only.", found);
    case 429:
      return new ApiError(`This key has used up its limit${later}`, found);
    case 503:
      return new ApiError(`${UNAVAILABLE[found.code] ?? "No replica can answer now"}${later}`, found);
    case 504:
      return new ApiError("The answer took too long, and the server has ended it.", found);
    default:
      return new ApiError(known < 500 ? "The server refused this request." : "The server failed.", found);
  }
}

/** @param {Response} answer */
async function errorOf(answer) {
  const text = await answer.text().catch(() => "");
  let error = { message: text.slice(0, 500) };
  try {
    error = JSON.parse(text).error ?? error;
  } catch {
    // A proxy's answer is no JSON; its words are shown as they are.
  }
  const seconds = Number.parseInt(answer.headers.get("Retry-After") ?? "", 10);
  return inWords(answer.status, error, Number.isNaN(seconds) ? null : seconds);
}

/**
 * Send a request; return the answer if it succeeded.
 * @param {string} path Without a slash at the beginning.
 * @param {{body?: object, signal?: AbortSignal, headers?: Record<string, string>}} options
 *   With a body it is a POST.
 */
export async function ask(path, { body, signal, headers = {} } = {}) {
  const key = readKey();
  const sent = new Headers(headers);
  if (key) sent.set("Authorization", `Bearer ${key}`);
  if (body) sent.set("Content-Type", "application/json");
  let answer;
  try {
    answer = await fetch(`${SERVER}/${path}`, {
      method: body ? "POST" : "GET",
      headers: sent,
      body: body && JSON.stringify(body),
      signal,
    });
  } catch (error) {
    throw signal?.aborted ? error : lost("The server can't be reached: it has stopped, or the network is gone.");
  }
  if (!answer.ok) throw await errorOf(answer);
  return answer;
}

/** @param {string} message */
const lost = (message) => new ApiError(message, { code: "connection_lost" });

/**
 * Send a request and read the events of its answer to the end.
 * @param {string} path
 * @param {object} body
 * @param {{onData: (payload: any, id?: string) => void, onComment: (text: string) => void,
 *   signal: AbortSignal, lastEventId?: string}} options With `lastEventId` the server goes on there.
 */
export async function stream(path, body, { onData, onComment, signal, lastEventId }) {
  const headers = { Accept: "text/event-stream", ...(lastEventId && { "Last-Event-ID": lastEventId }) };
  const answer = await ask(path, { body, signal, headers });
  let isDone = answer.status === 204; // what was resumed had ended
  const parser = createParser({
    onComment: (text) => onComment(text.trim()),
    onEvent: ({ data, id }) => {
      isDone ||= data === DONE;
      if (data === DONE) return;
      const payload = JSON.parse(data);
      if (payload.error) throw inWords(0, payload.error, null);
      onData(payload, id);
    },
  });
  const reader = answer.body?.pipeThrough(new TextDecoderStream()).getReader();
  try {
    while (reader && !isDone) {
      const { done, value } = await reader.read().catch((error) => {
        throw signal.aborted ? error : lost("The connection broke in the middle of the answer.");
      });
      if (done) throw lost("The answer ended before it was complete.");
      parser.feed(value);
    }
  } finally {
    reader?.cancel().catch(() => {}); // it may have broken already
  }
}
