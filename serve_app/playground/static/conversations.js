// The conversations of the chat: the one that is shown, the list of all, and what can be done with them.
//
// Answers go on while another conversation is shown. What has come of an answer is written every half second, and
// once more when the page is left: to the browser's storage, which keeps it even if the tab is gone at once.

import { messagesOf, newTurn, runAnswer, spoken } from "./answer.js";
import { openArchive } from "./archive.js";
import { forgetUnsaved, keepUnsaved, merged, readUnsaved } from "./journal.js";
import { DEFAULTS, fieldsOf } from "./options.js";
import { tabStorage } from "./storage.js";
import { exported, imported } from "./transfer.js";
import { append, newConversation, pathTo, show, shownOf, titleOf, versionsOf } from "./tree.js";

/** @typedef {import("./tree.js").Conversation} Conversation @typedef {import("./answer.js").Turn} Turn */

const CURRENT = "raystream-conversation";
const CHANGED = "raystream-conversations";
const WRITE_MS = 500;

export class Conversations {
  problem = "";
  list = /** @type {import("./archive.js").Summary[]} */ ([]);
  /** What was deleted last and can come back. */
  deleted = /** @type {Conversation[]} */ ([]);
  /** Whether the browser keeps conversations. */
  isKept = true;
  /** Ids of conversations that were deleted here; an answer that still ends does not bring them back. */
  #gone = new Set();
  #archive;
  #dirty = /** @type {Map<Conversation, Set<Turn>>} */ (new Map());
  #running = /** @type {Map<Conversation, {turn: Turn, aborting: AbortController}>} */ (new Map());
  #timer = 0;
  #others = "BroadcastChannel" in globalThis ? new BroadcastChannel(CHANGED) : null;

  /**
   * @param {() => void} onChange
   * @param {(text: string) => void} announce Tells a screen reader.
   * @param {ReturnType<openArchive>} archive
   */
  constructor(onChange, announce, archive = openArchive()) {
    Object.assign(this, { onChange, announce });
    this.#archive = archive;
    this.current = newConversation(DEFAULTS);
    if (this.#others) this.#others.onmessage = () => this.#relist();
  }

  /** Load what the browser keeps; show the conversation that this browser tab has shown. */
  async load() {
    const archive = await this.#archive;
    this.isKept = archive.isKept;
    for (const unsaved of readUnsaved()) {
      await this.#write(merged(await archive.read(unsaved.id), unsaved, true), unsaved.turns);
    }
    forgetUnsaved();
    const found = await archive.read(tabStorage.read(CURRENT));
    if (found && !this.current.turns.length) this.#show(found);
    await this.#relist();
  }

  get turns() {
    return shownOf(this.current);
  }

  get options() {
    return this.current.options;
  }
  get isBusy() {
    return this.#running.has(this.current);
  }

  /** @param {string} id Of a conversation. */
  isRunning(id) {
    return [...this.#running.keys()].some((each) => each.id === id);
  }

  /** @param {Turn} turn @returns {Turn[]} It and the turns in its place: edits of it, or other answers. */
  versionsOf = (turn) => versionsOf(this.current, turn);

  setOptions = (options) => {
    this.current.options = options;
    if (this.current.turns.length) this.#note(this.current);
    this.onChange();
  };

  ask(text, images = [], files = []) {
    return this.#answer(this.current.head, [newTurn("user", text, images, files)]);
  }

  edit(turn, text) {
    return this.#answer(turn.parent, [newTurn("user", text, turn.images, turn.files)]);
  }

  again(turn) {
    return this.#answer(turn.parent, []);
  }

  sendResults(turn) {
    const results = turn.calls.map(({ id, result }) => ({ ...newTurn("tool", result), callId: id }));
    return this.#answer(turn.id, results);
  }

  /** @param {Turn} turn The last one, whose stream was cut. */
  resume(turn) {
    this.#run(this.current, turn);
  }

  stop = () => this.#running.get(this.current)?.aborting.abort();

  /** Show another version of a turn. */
  showVersion = (turn) => {
    show(this.current, turn);
    this.#note(this.current);
    this.flush();
    const versions = this.versionsOf(turn);
    this.announce(`Version ${versions.indexOf(turn) + 1} of ${versions.length}.`);
    this.onChange();
  };

  /** Begin another conversation; this one stays in the list. */
  startNew = () => {
    this.#show(newConversation(this.options));
    this.announce("A new conversation.");
  };

  /** @param {string} id */
  async open(id) {
    await this.flush();
    const live = [...this.#running.keys()].find((each) => each.id === id);
    const found = live ?? (await (await this.#archive).read(id));
    if (!found) return this.#relist();
    this.#show(found);
    return this.announce(`${titleOf(found)}.`);
  }

  /** @param {string} id @param {string} title */
  async rename(id, title) {
    await this.flush();
    const live = [this.current, ...this.#running.keys()].filter((each) => each.id === id);
    const found = live[0] ?? (await (await this.#archive).read(id));
    if (!found) return;
    for (const each of [found, ...live]) each.title = title.trim();
    await this.#write(found, []);
    await this.#relist(true);
  }

  /** Delete conversations; `undo` brings the last ones back. */
  async remove(ids) {
    await this.flush();
    const found = await Promise.all(ids.map(async (id) => (await this.#archive).read(id)));
    this.deleted = found.filter((each) => each !== null);
    for (const id of ids) {
      this.#gone.add(id);
      for (const [running, { aborting }] of this.#running) if (running.id === id) aborting.abort();
      await (await this.#archive).remove(id);
    }
    if (ids.includes(this.current.id)) this.#show(newConversation(this.options));
    this.announce(this.deleted.length === 1 ? `Deleted ${titleOf(this.deleted[0])}.` : "Deleted all conversations.");
    await this.#relist(true);
  }

  async undo() {
    for (const each of this.deleted) {
      this.#gone.delete(each.id);
      await this.#write(each, each.turns);
    }
    this.announce("Restored.");
    this.deleted = [];
    await this.#relist(true);
  }

  /** @param {string} query @returns {Promise<Set<string>>} Ids. */
  async find(query) {
    await this.flush();
    return (await this.#archive).find(query);
  }

  /** @param {string} [id] All conversations without it. @returns {Promise<string>} The file's text. */
  async export(id) {
    await this.flush();
    return exported(id ? [await (await this.#archive).read(id)] : await (await this.#archive).all());
  }

  /**
   * Add the conversations of an export. One that is here already stays, and gets the turns that it lacks.
   * @param {string} text
   * @throws {import("./transfer.js").ImportError}
   */
  async import(text) {
    const found = imported(text);
    await this.flush();
    for (const each of found) {
      const here = merged(await (await this.#archive).read(each.id), each, false);
      this.#gone.delete(each.id);
      await this.#write(here, here.turns);
      if (each.id === this.current.id && !this.isBusy) this.current = await (await this.#archive).read(each.id);
    }
    this.announce(`${found.length} conversations imported.`);
    await this.#relist(true);
    return found.length;
  }

  /** Write what has changed. */
  async flush() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const dirty = [...this.#dirty];
    this.#dirty.clear();
    for (const [conversation, turns] of dirty) await this.#write(conversation, turns);
  }

  /** The page is left: stop its answers, and keep what has come. */
  leave() {
    for (const { aborting } of this.#running.values()) aborting.abort();
    keepUnsaved(Array.from(this.#running, ([conversation, { turn }]) => [conversation, turn]));
    this.flush();
  }

  /**
   * Append turns and the answer to them.
   * @param {string} parent
   * @param {Turn[]} added
   * @returns {boolean} Whether it is asked for; if an option can't be read, the conversation stays as it was.
   */
  #answer(parent, added) {
    const { current } = this;
    const turn = newTurn("assistant");
    const { system } = this.options;
    try {
      const messages = messagesOf([...pathTo(current, parent), ...added], system);
      const fields = fieldsOf(this.options);
      Object.assign(turn, { body: { ...fields, messages }, system, model: fields.model });
    } catch (error) {
      this.problem = error.message;
      this.onChange();
      return false;
    }
    append(current, parent, [...added, turn]);
    this.#note(current, ...added, turn);
    tabStorage.write(CURRENT, current.id);
    this.flush().then(() => this.#relist(true));
    this.#run(current, turn);
    return true;
  }

  /** Stream an answer. A conversation has one at a time: an answer that still runs is stopped. */
  async #run(conversation, turn) {
    this.#running.get(conversation)?.aborting.abort();
    const running = { turn, aborting: new AbortController() };
    this.#running.set(conversation, running);
    this.problem = "";
    this.announce("The answer begins.");
    await runAnswer(turn, {
      signal: running.aborting.signal,
      onChange: () => {
        this.#note(conversation, turn);
        this.onChange();
      },
      onNotice: this.announce,
    });
    if (this.#running.get(conversation) === running) {
      this.#running.delete(conversation);
      if (conversation === this.current) this.announce(spoken(turn));
    }
    this.#note(conversation, turn);
    await this.flush();
    await this.#relist(true);
  }

  /** Have a conversation, and turns of it, written soon. */
  #note(conversation, ...turns) {
    const noted = this.#dirty.get(conversation) ?? new Set();
    for (const turn of turns) noted.add(turn);
    this.#dirty.set(conversation, noted);
    this.#timer ||= setTimeout(() => this.flush(), WRITE_MS);
  }

  async #write(conversation, turns) {
    if (this.#gone.has(conversation.id)) return;
    try {
      await (await this.#archive).write(conversation, turns);
    } catch (error) {
      this.problem = `The browser does not keep this conversation (${error.name}): export it, or delete others.`;
      this.onChange();
    }
  }

  async #relist(isOurs = false) {
    if (isOurs) this.#others?.postMessage(null);
    this.list = await (await this.#archive).list();
    this.onChange();
  }

  /** @param {Conversation} conversation */
  #show(conversation) {
    conversation.options = { ...DEFAULTS, ...conversation.options };
    Object.assign(this, { current: conversation, problem: "" });
    tabStorage.write(CURRENT, conversation.turns.length ? conversation.id : "");
    this.onChange();
  }
}
