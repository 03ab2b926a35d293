// The conversations that the browser keeps, in IndexedDB. A browser that blocks site data keeps none; then they
// live until the page is left.
//
// A turn is a record of its own: a growing answer rewrites itself and not the pictures beside it, and two browser
// tabs that show a conversation don't write over each other's turns.

import { messagesOf } from "./answer.js";
import { matcher, pathTo, titleOf } from "./tree.js";

const NAME = "raystream";
const VERSION = 1;
const STORES = /** @type {const} */ (["conversations", "turns"]);

/**
 * @typedef {import("./tree.js").Conversation} Conversation
 * @typedef {import("./answer.js").Turn} Turn
 * @typedef {Omit<Conversation, "turns">} Summary Its title is never "".
 */

/** @param {IDBRequest} request @returns {Promise<any>} */
const result = (request) =>
  new Promise((done, fail) => {
    request.onsuccess = () => done(request.result);
    request.onerror = () => fail(request.error);
  });

/** @returns {Promise<IDBDatabase>} */
function opened(factory) {
  const request = factory.open(NAME, VERSION);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("conversations", { keyPath: "id" });
    request.result.createObjectStore("turns", { keyPath: "id" }).createIndex("conversation", "conversation");
  };
  return result(request);
}

/** @returns {Promise<Archive | TransientArchive>} */
export async function openArchive(factory = globalThis.indexedDB) {
  try {
    const database = await opened(factory);
    database.onversionchange = () => database.close();
    return new Archive(database);
  } catch {
    return new TransientArchive();
  }
}

const newestFirst = (one, other) => other.changedMs - one.changedMs;
const byOrder = (one, other) => one.order - other.order;

/** @param {Conversation} conversation */
const summaryOf = ({ turns, ...rest }) => ({ ...rest, shownTitle: titleOf({ ...rest, turns }) });

class Archive {
  isKept = true;

  /** @param {IDBDatabase} database */
  constructor(database) {
    this.database = database;
  }

  /** @returns {Promise<Summary[]>} The newest first. */
  async list() {
    return (await result(this.#store("conversations").getAll())).sort(newestFirst);
  }

  /** @param {string} id @returns {Promise<Conversation | null>} */
  async read(id) {
    const transaction = this.database.transaction(STORES);
    const turns = result(transaction.objectStore("turns").index("conversation").getAll(id));
    const { shownTitle, ...summary } = (await result(transaction.objectStore("conversations").get(id))) ?? {};
    if (!summary.id) return null;
    const stored = (await turns).sort(byOrder).map(({ conversation, order, ...turn }) => turn);
    return withRequests({ ...summary, turns: stored });
  }

  /** @returns {Promise<Conversation[]>} The newest first. */
  async all() {
    const found = await Promise.all((await this.list()).map(({ id }) => this.read(id)));
    return found.filter((each) => each !== null);
  }

  /**
   * Write a conversation, and those of its turns that have changed.
   * @param {Conversation} conversation
   * @param {Iterable<Turn>} changed
   * @throws {DOMException} The browser's storage is full.
   */
  async write(conversation, changed = conversation.turns) {
    const transaction = this.database.transaction(STORES, "readwrite");
    transaction.objectStore("conversations").put(summaryOf(conversation));
    for (const turn of changed) {
      const place = { conversation: conversation.id, order: conversation.turns.indexOf(turn) };
      transaction.objectStore("turns").put({ ...plain(turn), ...place });
    }
    transaction.commit(); // a page that is being left has no time to wait for the writes
    await finished(transaction);
  }

  /** @param {string} id */
  async remove(id) {
    const transaction = this.database.transaction(STORES, "readwrite");
    transaction.objectStore("conversations").delete(id);
    const turns = transaction.objectStore("turns");
    for (const key of await result(turns.index("conversation").getAllKeys(id))) turns.delete(key);
    await finished(transaction);
  }

  /**
   * Find the conversations whose title, or any of whose turns, holds each word of a query.
   * @param {string} query
   * @returns {Promise<Set<string>>} Their ids.
   */
  async find(query) {
    const isFound = matcher(query);
    const found = new Set((await this.list()).filter(({ shownTitle }) => isFound(shownTitle)).map(({ id }) => id));
    const request = this.#store("turns").openCursor();
    await new Promise((done, fail) => {
      request.onerror = () => fail(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (!cursor) return done(undefined);
        if (isFound(cursor.value.text)) found.add(cursor.value.conversation);
        return cursor.continue();
      };
    });
    return found;
  }

  /** @param {"conversations" | "turns"} name */
  #store(name) {
    return this.database.transaction(name).objectStore(name);
  }
}

/** @param {IDBTransaction} transaction @returns {Promise<void>} */
const finished = (transaction) =>
  new Promise((done, fail) => {
    transaction.oncomplete = () => done();
    transaction.onabort = () => fail(transaction.error);
  });

/**
 * Return a turn that can be stored: no stream runs behind it, and the messages of its request are the turns before
 * it (`withRequests` puts them back).
 * @param {Turn} turn
 */
export function plain(turn) {
  const { messages, ...fields } = /** @type {any} */ (turn.body ?? {});
  return {
    ...turn,
    waiting: "",
    state: turn.state === "running" ? "stopped" : turn.state,
    error: turn.error && { ...turn.error, message: turn.error.message },
    body: turn.body && fields,
  };
}

/** @param {Conversation} conversation @returns {Conversation} The same, whose answers know their requests. */
export function withRequests(conversation) {
  for (const turn of conversation.turns) {
    if (!turn.body) continue;
    turn.body = { ...turn.body, messages: messagesOf(pathTo(conversation, turn.parent), turn.system) };
  }
  return conversation;
}

/** The same without a database. */
export class TransientArchive {
  isKept = false;
  #all = /** @type {Map<string, Conversation>} */ (new Map());

  async list() {
    return [...this.#all.values()].map(summaryOf).sort(newestFirst);
  }

  async read(id) {
    const found = this.#all.get(id);
    return found ? withRequests(structuredClone({ ...found, turns: found.turns.map(plain) })) : null;
  }

  async all() {
    return Promise.all((await this.list()).map(({ id }) => this.read(id)));
  }

  async write(conversation) {
    this.#all.set(conversation.id, conversation);
  }

  async remove(id) {
    this.#all.delete(id);
  }

  async find(query) {
    const isFound = matcher(query);
    const holds = (each) => isFound(titleOf(each)) || each.turns.some(({ text }) => isFound(text));
    return new Set([...this.#all.values()].filter(holds).map(({ id }) => id));
  }
}
