// A conversation as a tree of turns: an edited question and a repeated answer stand beside the first ones, and
// one way from the root to a leaf is shown.

/**
 * @typedef {import("./answer.js").Turn} Turn
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title As its user has named it; "" takes the first question.
 * @property {number} createdMs Since 1970, as `changedMs`.
 * @property {number} changedMs
 * @property {string} head The id of the last turn that is shown; "" if there is none.
 * @property {Record<string, string>} options The form's fields.
 * @property {Turn[]} turns Of all branches, the oldest first; each names its parent.
 */

const LONGEST_TITLE = 60;

/** @returns {string} An id that no other conversation or turn has, here or in another browser. */
export const newId = () =>
  // `crypto.randomUUID` is missing on pages that come by http from another machine.
  Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** @param {Record<string, string>} options @returns {Conversation} */
export function newConversation(options) {
  const now = Date.now();
  return { id: newId(), title: "", createdMs: now, changedMs: now, head: "", options: { ...options }, turns: [] };
}

/**
 * Return the turns from the root to a turn.
 * @param {Conversation} conversation
 * @param {string} id "" gives none.
 */
export function pathTo({ turns }, id) {
  const byId = new Map(turns.map((turn) => [turn.id, turn]));
  const path = [];
  for (let turn = byId.get(id); turn; turn = byId.get(turn.parent)) path.unshift(turn);
  return path;
}

/** @param {Conversation} conversation @returns {Turn[]} The turns that are shown. */
export const shownOf = (conversation) => pathTo(conversation, conversation.head);

/** @param {Conversation} conversation @param {Turn} turn @returns {Turn[]} It and those in its place. */
export const versionsOf = ({ turns }, turn) => turns.filter(({ parent }) => parent === turn.parent);

/**
 * Append turns, one below the other, and show the last.
 * @param {Conversation} conversation
 * @param {string} parent Id of the turn that they follow; "" begins the conversation.
 * @param {Turn[]} added
 */
export function append(conversation, parent, added) {
  for (const turn of added) {
    turn.parent = parent;
    conversation.turns.push(turn);
    parent = turn.id;
  }
  conversation.head = parent;
  conversation.changedMs = Date.now();
}

/**
 * Show a turn, and below it what came last.
 * @param {Conversation} conversation
 * @param {Turn} turn
 */
export function show(conversation, turn) {
  let leaf = turn;
  for (let next = leaf; next; next = conversation.turns.findLast(({ parent }) => parent === leaf.id)) leaf = next;
  conversation.head = leaf.id;
}

/** @param {Conversation} conversation @returns {string} "" while nothing is asked. */
export function titleOf({ title, turns }) {
  const first = turns.find(({ role, text }) => role === "user" && text);
  const asked = first?.text.trim().split("\n", 1)[0] ?? "";
  return title || (asked.length > LONGEST_TITLE ? `${asked.slice(0, LONGEST_TITLE).trimEnd()}…` : asked)
    || (turns.length ? "Picture or file" : "");
}

/** @param {string} query @returns {(text: string) => boolean} Whether a text holds each word of the query. */
export function matcher(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  return (text) => {
    const lower = text.toLowerCase();
    return words.every((word) => lower.includes(word));
  };
}
