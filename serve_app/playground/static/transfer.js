// Conversations as a file: what an export holds, and what of an import is believed.

import { newTurn } from "./answer.js";
import { plain } from "./archive.js";
import { newId } from "./tree.js";

const FORMAT = "raystream-conversations";
const VERSION = 1;
const PICTURE = /^data:image\/(png|jpeg|webp|gif);base64,[\w+/=]*$/;
const ROLES = new Set(["user", "assistant", "tool"]);
const FINISHED = new Set(["complete", "stopped", "failed"]);

/** A file that holds no conversations. */
export class ImportError extends Error {}

/** @param {import("./tree.js").Conversation[]} conversations @returns {string} JSON. */
export function exported(conversations) {
  // An answer's request repeats all turns before it.
  const slim = conversations.map((each) => ({
    ...each, turns: each.turns.map((turn) => ({ ...plain(turn), body: null })),
  }));
  return `${JSON.stringify({ format: FORMAT, version: VERSION, conversations: slim }, null, 1)}\n`;
}

/**
 * Return the conversations of an export. What is missing or of another type takes its default; a conversation
 * without turns is left out.
 * @param {string} text
 * @returns {import("./tree.js").Conversation[]}
 * @throws {ImportError} It is no export of this page.
 */
export function imported(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new ImportError("The file is no JSON: choose one that this page has exported.");
  }
  if (found?.format !== FORMAT || !Array.isArray(found.conversations)) {
    throw new ImportError("The file holds no conversations of this page.");
  }
  if (found.version !== VERSION) {
    throw new ImportError(`The file has version ${found.version}; this page reads version ${VERSION}.`);
  }
  return found.conversations.map(conversationOf).filter(({ turns }) => turns.length);
}

function conversationOf(given) {
  const turns = [];
  const known = new Set([""]);
  for (const each of list(given?.turns)) {
    const turn = turnOf(each);
    // A parent stands before its children, so there is no circle.
    if (!ROLES.has(turn.role) || !known.has(turn.parent) || known.has(turn.id)) continue;
    known.add(turn.id);
    turns.push(turn);
  }
  const head = string(given?.head);
  const options = Object.entries(given?.options ?? {}).filter(([, value]) => typeof value === "string");
  return {
    id: string(given?.id) || newId(),
    title: string(given?.title),
    createdMs: time(given?.createdMs),
    changedMs: time(given?.changedMs),
    head: known.has(head) && head ? head : (turns.at(-1)?.id ?? ""),
    options: Object.fromEntries(options),
    turns,
  };
}

function turnOf(given) {
  const turn = newTurn(string(given?.role), string(given?.text));
  const files = list(given?.files).map((each) => ({ name: string(each?.name), text: string(each?.text) }));
  const calls = list(given?.calls).map((each) => ({
    id: string(each?.id), name: string(each?.name), arguments: string(each?.arguments), result: string(each?.result),
  }));
  const usage = given?.usage;
  return {
    ...turn,
    id: string(given?.id) || turn.id,
    parent: string(given?.parent),
    images: list(given?.images).filter((uri) => PICTURE.test(string(uri))),
    files,
    calls,
    callId: string(given?.callId),
    reasoning: string(given?.reasoning),
    model: string(given?.model),
    state: FINISHED.has(given?.state) ? given.state : "stopped",
    finish: string(given?.finish),
    usage: Number.isFinite(usage?.completion_tokens) && Number.isFinite(usage?.prompt_tokens) ? usage : null,
  };
}

const string = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : []);
const time = (value) => (Number.isFinite(value) ? value : Date.now());
