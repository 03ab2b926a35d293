// What this page has of its conversations, and what the browser keeps of them: reading, writing, and writing again
// what could not be written.

import { openArchive, summaryOf } from "./archive.js";
import { merged } from "./journal.js";
import { exported } from "./transfer.js";

/**
 * @typedef {import("./tree.js").Conversation} Conversation
 * @typedef {import("./answer.js").Turn} Turn
 * @typedef {{removed?: string[], restored?: string[]}} Told Ids of conversations, to the other browser tabs.
 */

const CHANGED = "raystream-conversations";
const WRITE_MS = 500;

export class Keeper {
  problem = "";
  list = /** @type {import("./archive.js").Summary[]} */ ([]);
  /** Ids of conversations that were deleted here; an answer that still ends does not bring them back. */
  gone = new Set();
  archive;
  /** What is to be written, and what could not be: it is tried again with the next write. */
  dirty = /** @type {Map<Conversation, Set<Turn>>} */ (new Map());
  #writing = Promise.resolve();
  /** What was told of the last write that failed. */
  #unkept = "";
  running = /** @type {Map<Conversation, {turn: Turn, aborting: AbortController}>} */ (new Map());
  #timer = 0;
  others = "BroadcastChannel" in globalThis ? new BroadcastChannel(CHANGED) : null;

  /**
   * @param {() => void} onChange
   * @param {ReturnType<openArchive>} archive
   */
  constructor(onChange, archive) {
    this.onChange = onChange;
    this.archive = archive;
    this.current = /** @type {Conversation} */ (null);
  }

  /** @param {string} query @returns {Promise<Set<string>>} Ids. */
  async find(query) {
    await this.flush();
    return (await this.archive).find(query);
  }

  /** @param {string} [id] All conversations without it. @returns {Promise<string>} The file's text. */
  async export(id) {
    await this.flush();
    await this.relist();
    return exported(await this.whole(id ? [id] : this.list.map((each) => each.id)));
  }

  /** Write what has changed, and wait for the writes that are under way. */
  flush() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const dirty = [...this.dirty];
    this.dirty.clear();
    const writes = dirty.map(([conversation, turns]) => this.write(conversation, turns));
    this.#writing = Promise.all([this.#writing, ...writes]).then(() => {
      if (!this.problem || this.problem !== this.#unkept || this.dirty.size) return;
      this.problem = "";
      this.onChange();
    });
    return this.#writing;
  }

  /** Have a conversation, and turns of it, written soon. */
  note(conversation, ...turns) {
    this.owe(conversation, turns);
    this.#timer ||= setTimeout(() => this.flush(), WRITE_MS);
  }

  owe(conversation, turns) {
    if (this.gone.has(conversation.id)) return;
    const noted = this.dirty.get(conversation) ?? new Set();
    for (const turn of turns) noted.add(turn);
    this.dirty.set(conversation, noted);
  }

  /** @returns {Promise<boolean>} Whether the browser keeps it; if not, it is told, and tried again. */
  async write(conversation, turns) {
    const archive = await this.archive;
    if (this.gone.has(conversation.id)) return true;
    try {
      await archive.write(conversation, turns);
    } catch (error) {
      this.owe(conversation, turns);
      this.#unkept = `The browser does not keep this conversation (${error.name}): export it, or delete others.`;
      this.problem = this.#unkept;
      this.onChange();
      return false;
    }
    return true;
  }

  /** @returns {Conversation[]} Those of which this page has a copy that it may write. */
  live() {
    return [this.current, ...this.running.keys(), ...this.dirty.keys()];
  }

  /** @param {string} id @returns {Promise<Conversation | null>} With what is not written yet. */
  async read(id) {
    const ours = [...this.running.keys(), ...this.dirty.keys()].find((each) => each.id === id);
    return ours ?? (await this.archive).read(id);
  }

  /** @param {string[]} ids @returns {Promise<Conversation[]>} What is kept of each, and what is not written yet. */
  async whole(ids) {
    const archive = await this.archive;
    const found = await Promise.all(ids.map(async (id) => {
      const [ours, kept] = [await this.read(id), await archive.read(id)];
      return ours && kept ? merged(ours, kept, false) : ours;
    }));
    return found.filter((each) => each !== null);
  }

  /** @param {Told} [told] What this tab has changed; null if it has changed nothing. */
  async relist(told = null) {
    if (told) this.others?.postMessage(told);
    const kept = await (await this.archive).list();
    const known = new Set(kept.map(({ id }) => id));
    const unkept = new Map([...this.dirty.keys()].map((each) => [each.id, each]));
    this.list = [...[...unkept.values()].filter(({ id }) => !known.has(id)).map(summaryOf), ...kept];
    this.onChange();
  }
}
