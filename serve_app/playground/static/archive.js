// The conversations that the browser keeps, in IndexedDB. A browser that blocks site data keeps none; then they
// live until the page is left.
//
// A turn is a record of its own: a growing answer rewrites itself and not the pictures beside it, and two browser
// tabs that show a conversation don't write over each other's turns. Its key names its conversation too, so a file
// that is imported can't take the turns of another conversation.

import { messagesOf } from "./answer.js";
import { matcher, pathTo, show, titleOf } from "./tree.js";

const NAME = "raystream";
const VERSION = 2;
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
  request.onupgradeneeded = ({ oldVersion }) => {
    const database = request.result;
    const createTurns = (records) => {
      const turns = database.createObjectStore("turns", { keyPath: ["conversation", "id"] });
      turns.createIndex("conversation", "conversation");
      for (const record of records) turns.put(record);
    };
    if (!oldVersion) {
      database.createObjectStore("conversations", { keyPath: "id" });
      return createTurns([]);
    }
    const before = request.transaction.objectStore("turns").getAll(); // of version 1, whose key is `id` alone
    before.onsuccess = () => {
      database.deleteObjectStore("turns");
      createTurns(before.result);
    };
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
export const summaryOf = ({ turns, ...rest }) => ({ ...rest, shownTitle: titleOf({ ...rest, turns }) });

/** @param {Conversation} conversation @param {Turn} turn */
const recordOf = ({ id, turns }, turn) => ({ ...plain(turn), conversation: id, order: turns.indexOf(turn) });

/** @returns {Conversation} Of what is stored. */
function restored({ shownTitle, ...summary }, records) {
  const turns = records.sort(byOrder).map(({ conversation, order, ...turn }) => turn);
  const found = { ...summary, turns };
  // Another browser tab may have gone on after the head, or the head was not stored.
  const head = turns.find(({ id }) => id === found.head) ?? turns.at(-1);
  if (head) show(found, head);
  return withRequests(found);
}

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
    const summary = await result(transaction.objectStore("conversations").get(id));
    return summary ? restored(summary, await turns) : null;
  }

  /**
   * Write a conversation, and those of its turns that have changed.
   * @param {Conversation} conversation
   * @param {Iterable<Turn>} changed
   * @throws {DOMException} The browser's storage is full.
   */
  async write(conversation, changed) {
    const transaction = this.database.transaction(STORES, "readwrite");
    transaction.objectStore("conversations").put(summaryOf(conversation));
    for (const turn of changed) transaction.objectStore("turns").put(recordOf(conversation, turn));
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
  #all = /** @type {Map<string, {summary: Summary, turns: Map<string, any>}>} */ (new Map());

  async list() {
    return Array.from(this.#all.values(), ({ summary }) => ({ ...summary })).sort(newestFirst);
  }

  async read(id) {
    const found = this.#all.get(id);
    return found ? restored(structuredClone(found.summary), structuredClone([...found.turns.values()])) : null;
  }

  async write(conversation, changed) {
    const turns = this.#all.get(conversation.id)?.turns ?? new Map();
    for (const turn of changed) turns.set(turn.id, structuredClone(recordOf(conversation, turn)));
    this.#all.set(conversation.id, { summary: structuredClone(summaryOf(conversation)), turns });
  }

  async remove(id) {
    this.#all.delete(id);
  }

  async find(query) {
    const isFound = matcher(query);
    const holds = ({ summary, turns }) =>
      isFound(summary.shownTitle) || [...turns.values()].some(({ text }) => isFound(text));
    return new Set([...this.#all.values()].filter(holds).map(({ summary }) => summary.id));
  }
}
