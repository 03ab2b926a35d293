// A conversation's turns: how they become a request, and how a stream becomes an answer.

import { ApiError, stream } from "./api.js";
import { withFiles } from "./files.js";
import { newId } from "./tree.js";

/**
 * @typedef {{id: string, name: string, arguments: string, result: string}} Call
 *
 * @typedef {object} Turn
 * @property {string} id
 * @property {string} parent The id of the turn before it; "" if it is the first.
 * @property {"user" | "assistant" | "tool"} role
 * @property {string} text
 * @property {string[]} images data: URIs.
 * @property {import("./files.js").TextFile[]} files
 * @property {string} reasoning
 * @property {Call[]} calls
 * @property {string} callId Of the call that a tool's turn answers.
 * @property {{text: string, tokens: number}[]} marks What happened to the stream, and after how many tokens.
 * @property {string} waiting What the stream waits for; "" if it does not.
 * @property {"running" | "complete" | "stopped" | "failed"} state
 * @property {ApiError | null} error
 * @property {any} usage As the server counts.
 * @property {string} finish Why the answer ended.
 * @property {Timing} timing
 * @property {object | null} body The request.
 * @property {string} system The system prompt of the request.
 * @property {string} model That answers.
 * @property {string} [lastEventId]
 *
 * @typedef {{sentMs: number, firstMs: number, lastMs: number, firstTokens: number}} Timing
 */

/** @returns {Turn} */
export const newTurn = (role, text = "", images = [], files = []) => ({
  id: newId(), parent: "", role, text, images, files, reasoning: "", calls: [], callId: "", marks: [], waiting: "",
  state: role === "assistant" ? "running" : "complete", error: null, usage: null, finish: "",
  timing: { sentMs: 0, firstMs: 0, lastMs: 0, firstTokens: 0 }, body: null,
  system: "", model: "",
});

/** @param {Turn} turn */
export const isEmpty = (turn) => !turn.text && !turn.calls.length;

/**
 * Return the messages of a request. A question whose answer never came is not asked again.
 * @param {Turn[]} turns
 * @param {string} system
 */
export function messagesOf(turns, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  turns.forEach((turn, index) => {
    const next = turns[index + 1];
    const isUnanswered = turn.role === "user" && next?.role === "assistant" && isEmpty(next);
    if (isUnanswered || (turn.role === "assistant" && isEmpty(turn))) return;
    messages.push(messageOf(turn));
  });
  return messages;
}

/** @param {Turn} turn */
function messageOf(turn) {
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.callId, content: turn.text };
  if (turn.role === "assistant") {
    const calls = turn.calls.map(({ id, name, arguments: given }) => ({
      id, type: "function", function: { name, arguments: given },
    }));
    return { role: "assistant", content: turn.text || null, ...(calls.length && { tool_calls: calls }) };
  }
  const images = turn.images.map((url) => ({ type: "image_url", image_url: { url } }));
  const text = withFiles(turn.text, turn.files);
  const content = images.length ? [...images, { type: "text", text }] : text;
  return { role: "user", content };
}

/**
 * Stream the answer to `turn.body` into a turn; it never throws.
 * @param {Turn} turn It keeps what has arrived, however the stream ends.
 * @param {{signal: AbortSignal, onChange: () => void, onNotice: (text: string) => void, path?: string}} options
 */
export async function runAnswer(turn, { signal, onChange, onNotice, path = "v1/chat/completions" }) {
  const { timing } = turn;
  // A stream that goes on does not count the time for which it was cut, nor the clock of a page that was left.
  const pauseMs = performance.now() - (timing.lastMs || timing.sentMs);
  for (const name of ["sentMs", "firstMs", "lastMs"]) if (timing[name]) timing[name] += pauseMs;
  timing.sentMs ||= performance.now();
  Object.assign(turn, { state: "running", error: null });
  try {
    await stream(path, { ...turn.body, ...STREAMED }, {
      signal,
      lastEventId: turn.lastEventId,
      onData: (chunk, id) => {
        gain(turn, chunk, id);
        onChange();
      },
      onComment: (comment) => {
        const notice = noticed(turn, comment);
        if (notice) onNotice(notice);
        onChange();
      },
    });
    turn.state = "complete";
  } catch (error) {
    turn.state = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) {
      turn.error = error instanceof ApiError ? error : new ApiError(`The answer can't be read: ${error}`);
    }
  }
  turn.waiting = "";
  onChange();
}

const STREAMED = {
  stream: true,
  stream_options: { include_usage: true, continuous_usage_stats: true },
};

/** @param {Turn} turn */
function gain(turn, chunk, id) {
  const now = performance.now();
  if (id) turn.lastEventId = id;
  turn.usage = chunk.usage ?? turn.usage;
  const choice = chunk.choices[0];
  const { content, reasoning_content: reasoning, tool_calls: calls = [] } = choice?.delta ?? { content: choice?.text };
  turn.text += content ?? "";
  turn.reasoning += reasoning ?? "";
  for (const part of calls ?? []) gainCall(turn.calls, part);
  turn.finish = choice?.finish_reason ?? turn.finish;
  if (content || reasoning || calls?.length) {
    turn.waiting = "";
    noteTime(turn, now);
  }
}

/** @param {Turn} turn */
function noteTime({ timing, usage }, now) {
  if (!timing.firstMs) {
    timing.firstMs = now;
    timing.firstTokens = usage?.completion_tokens ?? 0;
  }
  timing.lastMs = now;
}

/** @param {Call[]} calls */
function gainCall(calls, { index, id, function: called }) {
  calls[index] ??= { id: id ?? "", name: "", arguments: "", result: "" };
  calls[index].name += called?.name ?? "";
  calls[index].arguments += called?.arguments ?? "";
}

const PARKED = "Parked: others run first. It goes on where it is.";

/** @param {Turn} turn */
const tokensOf = (turn) => turn.usage?.completion_tokens ?? 0;

/**
 * Note what a comment says of the stream, and return it in words; "" for a ping.
 * @param {Turn} turn
 * @param {string} comment
 */
function noticed(turn, comment) {
  const loading = /^loading (.+) \((\d+) s\)$/.exec(comment);
  if (comment === "moved") {
    turn.waiting = "";
    const text = "moved to another replica";
    turn.marks.push({ text, tokens: tokensOf(turn) });
    return `The answer has ${text}.`;
  }
  if (comment === "parked") {
    if (turn.waiting !== PARKED) turn.marks.push({ text: "was parked while others ran", tokens: tokensOf(turn) });
    turn.waiting = PARKED;
  } else if (comment === "waiting") turn.waiting = "Its replica was lost; waiting for another one.";
  else if (comment.startsWith("resuming")) turn.waiting = "What has arrived is generated again.";
  else if (loading) turn.waiting = `Loading ${loading[1]}, ${loading[2]} s so far.`;
  else return "";
  return turn.waiting;
}

/** A shorter time between the first token and the last says nothing about the speed. */
const LEAST_S = 0.02;

/**
 * Return what is known of an answer's speed; null where nothing is known yet.
 * @param {Turn} turn
 */
export function figuresOf({ timing, usage }) {
  const tokens = usage?.completion_tokens ?? 0;
  const seconds = (timing.lastMs - timing.firstMs) / 1000;
  const isTold = seconds >= LEAST_S && tokens > timing.firstTokens;
  return {
    ttftMs: timing.firstMs ? timing.firstMs - timing.sentMs : null,
    tokensPerS: isTold ? (tokens - timing.firstTokens) / seconds : null,
    tokens,
    promptTokens: usage?.prompt_tokens ?? null,
    cachedTokens: usage?.prompt_tokens_details?.cached_tokens ?? 0,
    reasoningTokens: usage?.completion_tokens_details?.reasoning_tokens ?? 0,
  };
}

const LONGEST_SPOKEN = 400;

/** @param {Turn} turn What a screen reader says of it once it has ended. */
export function spoken({ state, text, error, usage }) {
  if (state === "failed") return error.message;
  const tokens = `${usage?.completion_tokens ?? 0} tokens`;
  if (state === "stopped") return `Stopped after ${tokens}.`;
  return text.length <= LONGEST_SPOKEN ? `Answer: ${text}` : `The answer is complete, ${tokens}.`;
}
