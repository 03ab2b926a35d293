// The conversations of the chat: the one that is shown, the list of all, and what can be done with them.
//
// Answers go on while another conversation is shown. What has come of an answer is written every half second, and
// once more when the page is left: to the browser's storage, which keeps it even if the tab is gone at once.

import { messagesOf, newTurn, runAnswer, spoken } from "./answer.js";
import { openArchive, withRequests } from "./archive.js";
import { forgetUnsaved, keepUnsaved, merged, readUnsaved } from "./journal.js";
import { Keeper } from "./keeper.js";
import { DEFAULTS, fieldsOf } from "./options.js";
import { tabStorage } from "./storage.js";
import { imported } from "./transfer.js";
import { append, newConversation, pathTo, show, shownOf, titleOf, versionsOf } from "./tree.js";

/**
 * @typedef {import("./tree.js").Conversation} Conversation
 * @typedef {import("./answer.js").Turn} Turn
 * @typedef {import("./keeper.js").Told} Told
 */

const CURRENT = "raystream-conversation";

/** @param {number} count Of conversations. */
export const importedText = (count) => `${count} conversation${count === 1 ? "" : "s"} imported.`;

export class Conversations extends Keeper {
  /** What was deleted last and can come back. */
  deleted = /** @type {Conversation[]} */ ([]);
  /** Whether the browser keeps conversations. */
  isKept = true;

  /**
   * @param {() => void} onChange
   * @param {(text: string) => void} announce Tells a screen reader.
   * @param {ReturnType<openArchive>} archive
   */
  constructor(onChange, announce, archive = openArchive()) {
    super(onChange, archive);
    this.announce = announce;
    this.current = newConversation(DEFAULTS);
    if (this.others) this.others.onmessage = ({ data }) => this.#follow(data ?? {});
  }

  /**
   * Load what the browser keeps; show the conversation that this browser tab has shown. To be called again when the
   * browser brings the page back as it was left.
   */
  async load() {
    const archive = await this.archive;
    this.isKept = archive.isKept;
    for (const unsaved of readUnsaved()) {
      const whole = withRequests(merged(await this.read(unsaved.id), structuredClone(unsaved), true));
      const ids = new Set(unsaved.turns.map(({ id }) => id));
      if (await this.write(whole, whole.turns.filter(({ id }) => ids.has(id)))) forgetUnsaved([unsaved]);
    }
    const found = await this.read(tabStorage.read(CURRENT));
    if (found && !this.current.turns.length) this.#show(found);
    await this.relist();
  }

  get turns() {
    return shownOf(this.current);
  }

  get options() {
    return this.current.options;
  }
  get isBusy() {
    return this.running.has(this.current);
  }

  /** @param {string} id Of a conversation. */
  isRunning(id) {
    return [...this.running.keys()].some((each) => each.id === id);
  }

  /** @param {Turn} turn @returns {Turn[]} It and the turns in its place: edits of it, or other answers. */
  versionsOf = (turn) => versionsOf(this.current, turn);

  setOptions = (options) => {
    this.current.options = options;
    if (this.current.turns.length) this.note(this.current);
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

  stop = () => this.running.get(this.current)?.aborting.abort();

  /** Show another version of a turn. */
  showVersion = (turn) => {
    show(this.current, turn);
    this.note(this.current);
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
    const found = await this.read(id);
    if (!found) return this.relist();
    this.#show(found);
    return this.announce(`${titleOf(found)}.`);
  }

  /** @param {string} id @param {string} title */
  async rename(id, title) {
    await this.flush();
    const live = this.live().filter((each) => each.id === id);
    const found = live[0] ?? (await (await this.archive).read(id));
    if (!found) return;
    for (const each of [found, ...live]) each.title = title.trim();
    await this.write(found, []);
    await this.relist({});
  }

  /** Delete conversations; `undo` brings the last ones back. */
  async remove(ids) {
    await this.flush();
    this.deleted = await this.whole(ids);
    this.#close(ids);
    for (const id of ids) await (await this.archive).remove(id);
    this.announce(this.deleted.length === 1 ? `Deleted ${titleOf(this.deleted[0])}.` : "Deleted all conversations.");
    await this.flush(); // there may be room now for what could not be written
    await this.relist({ removed: ids });
  }

  /** Bring back what was deleted last; what can't be written can be brought back again. */
  async undo() {
    const ids = this.deleted.map(({ id }) => id);
    const failed = [];
    for (const each of this.deleted) {
      this.gone.delete(each.id);
      if (!(await this.write(each, each.turns))) failed.push(each);
    }
    this.deleted = failed;
    if (!failed.length) this.announce("Restored.");
    await this.relist({ restored: ids });
  }

  /**
   * Add the conversations of an export. One that is here already stays, and gets the turns that it lacks.
   * @param {string} text
   * @throws {import("./transfer.js").ImportError}
   */
  async import(text) {
    const found = imported(text);
    await this.flush();
    let isWritten = true;
    for (const each of found) {
      const here = merged(await this.read(each.id), each, false);
      this.gone.delete(each.id);
      isWritten = (await this.write(here, here.turns)) && isWritten;
      if (each.id === this.current.id && !this.isBusy) this.current = await this.read(each.id);
    }
    if (isWritten) this.announce(importedText(found.length));
    await this.relist({ restored: found.map(({ id }) => id) });
    return found.length;
  }

  /** The page is left: stop its answers, and keep what has come. */
  leave() {
    for (const { aborting } of this.running.values()) aborting.abort();
    const running = [...this.running].filter(([{ id }]) => !this.gone.has(id));
    keepUnsaved(running.map(([conversation, { turn }]) => [conversation, turn]));
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
    this.note(current, ...added, turn);
    tabStorage.write(CURRENT, current.id);
    this.flush().then(() => this.relist({}));
    this.#run(current, turn);
    return true;
  }

  /** Stream an answer. A conversation has one at a time: an answer that still runs is stopped. */
  async #run(conversation, turn) {
    this.running.get(conversation)?.aborting.abort();
    const running = { turn, aborting: new AbortController() };
    this.running.set(conversation, running);
    this.problem = "";
    this.announce("The answer begins.");
    await runAnswer(turn, {
      signal: running.aborting.signal,
      onChange: () => {
        this.note(conversation, turn);
        this.onChange();
      },
      onNotice: this.announce,
    });
    if (this.running.get(conversation) === running) {
      this.running.delete(conversation);
      if (conversation === this.current) this.announce(spoken(turn));
    }
    this.note(conversation, turn);
    await this.flush();
    await this.relist({});
  }

  /** Let go of conversations that are deleted. */
  #close(ids) {
    for (const id of ids) this.gone.add(id);
    for (const [{ id }, { aborting }] of this.running) if (ids.includes(id)) aborting.abort();
    for (const each of this.dirty.keys()) if (ids.includes(each.id)) this.dirty.delete(each);
    if (ids.includes(this.current.id)) this.#show(newConversation(this.options));
  }

  /**
   * Do as another browser tab has done.
   * @param {Told} told
   */
  async #follow({ removed = [], restored = [] }) {
    for (const id of restored) this.gone.delete(id);
    const isShown = removed.includes(this.current.id);
    this.#close(removed);
    if (isShown) {
      this.problem = "The conversation was deleted in another browser tab; Undo there brings it back.";
      this.announce(this.problem);
    }
    await this.relist();
    const titles = new Map(this.list.map(({ id, title }) => [id, title]));
    for (const each of this.live()) each.title = titles.get(each.id) ?? each.title;
  }

  /** @param {Conversation} conversation */
  #show(conversation) {
    conversation.options = { ...DEFAULTS, ...conversation.options };
    Object.assign(this, { current: conversation, problem: "" });
    tabStorage.write(CURRENT, conversation.turns.length ? conversation.id : "");
    this.onChange();
  }
}
