// What a page keeps at the moment when it is left: the answers that run. IndexedDB may not write then; the
// browser's other storage does, at once.

import { plain } from "./archive.js";
import { browserStorage } from "./storage.js";

const UNSAVED = "raystream-unsaved";

/** @typedef {import("./tree.js").Conversation} Conversation @typedef {import("./answer.js").Turn} Turn */

/** @param {Iterable<[Conversation, Turn]>} running Conversations and the turns that run in them. */
export function keepUnsaved(running) {
  const unsaved = Array.from(running, ([{ turns, ...summary }, turn]) => {
    // The question may not be stored yet, either. Pictures are too large for this storage.
    const question = turns.filter(({ id, images }) => id === turn.parent && !images.length);
    return { ...summary, turns: [...question, turn].map(plain) };
  });
  if (unsaved.length) browserStorage.write(UNSAVED, JSON.stringify([...readUnsaved(), ...unsaved]));
}

/** @returns {Conversation[]} What pages have kept so, with these turns only. */
export function readUnsaved() {
  try {
    return JSON.parse(browserStorage.read(UNSAVED) || "[]");
  } catch {
    return [];
  }
}

/** @param {Conversation[]} taken As they were read; what a page has kept since then stays. */
export function forgetUnsaved(taken) {
  const texts = new Set(taken.map((each) => JSON.stringify(each)));
  const left = readUnsaved().filter((each) => !texts.has(JSON.stringify(each)));
  browserStorage.write(UNSAVED, left.length ? JSON.stringify(left) : "");
}

/**
 * Return a conversation with the turns of another copy of it.
 * @param {Conversation | null} here
 * @param {Conversation} other
 * @param {boolean} isNewer Whether the other copy's turns replace ours that have come no further; otherwise it only
 * adds those that lack.
 * @returns {Conversation}
 */
export function merged(here, other, isNewer) {
  if (!here) return other;
  const known = new Set(here.turns.map(({ id }) => id));
  const others = new Map(isNewer ? other.turns.map((turn) => [turn.id, turn]) : []);
  const turns = here.turns.map((turn) => {
    const theirs = others.get(turn.id);
    return theirs && turn.state !== "complete" && reach(theirs) >= reach(turn) ? theirs : turn;
  });
  return { ...here, turns: [...turns, ...other.turns.filter(({ id }) => !known.has(id))] };
}

/** @param {Turn} turn */
const reach = ({ text, reasoning }) => text.length + reasoning.length;
