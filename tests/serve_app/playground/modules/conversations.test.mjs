import assert from "node:assert/strict";
import { test } from "node:test";
import { moduleOf } from "./page.mjs";

delete globalThis.BroadcastChannel; // an open one keeps the process alive
const { TransientArchive } = await moduleOf("archive");
const { Conversations } = await moduleOf("conversations");
const { readUnsaved } = await moduleOf("journal");
const { browserStorage } = await moduleOf("storage");
const { ImportError, exported, imported } = await moduleOf("transfer");

const chunk = (text, finish = null) =>
  `data: ${JSON.stringify({ choices: [{ delta: { content: text }, finish_reason: finish }], usage: { completion_tokens: 1 } })}\n\n`;

/** Let the server answer with these texts, one answer each; `hold` leaves the last one open. */
function serve(texts, { hold = false } = {}) {
  const asked = [];
  globalThis.fetch = async (url, { body, signal }) => {
    asked.push(JSON.parse(body));
    const text = texts[asked.length - 1];
    const isHeld = hold && asked.length === texts.length;
    const stream = new ReadableStream({
      start(controller) {
        controller.enqueue(new TextEncoder().encode(chunk(text, isHeld ? null : "stop")));
        if (isHeld) signal.addEventListener("abort", () => controller.error(signal.reason));
        else {
          controller.enqueue(new TextEncoder().encode("data: [DONE]\n\n"));
          controller.close();
        }
      },
    });
    return new Response(stream, { status: 200 });
  };
  return asked;
}

/** @returns {Promise<void>} When the condition holds; it is looked at after each change. */
const until = async (condition) => {
  while (!condition()) await new Promise((done) => setImmediate(done));
};

async function opened(archive = new TransientArchive()) {
  const it = new Conversations(() => {}, () => {}, Promise.resolve(archive));
  await it.load();
  it.setOptions({ ...it.options, model: "m" });
  return it;
}

async function ask(it, text) {
  it.ask(text);
  await until(() => !it.isBusy);
}

const texts = (it) => it.turns.map(({ text }) => text);

test("a repeated answer and an edited question leave the first ones where they were", async () => {
  const asked = serve(["one", "two", "three"]);
  const it = await opened();
  await ask(it, "First");
  it.again(it.turns.at(-1));
  await until(() => !it.isBusy);
  it.edit(it.turns[0], "Second");
  await until(() => !it.isBusy);
  assert.deepEqual(asked.map(({ messages }) => messages.map(({ content }) => content)), [["First"], ["First"], ["Second"]]);
  const [question] = it.versionsOf(it.turns[0]);
  it.showVersion(question);
  assert.deepEqual(texts(it), ["First", "two"]);
  const [answer] = it.versionsOf(it.turns[1]);
  it.showVersion(answer);
  assert.deepEqual(texts(it), ["First", "one"]);
});

test("a new chat leaves the one before in the list, and its answer goes on", async () => {
  serve(["half", "whole"], { hold: false });
  const it = await opened();
  serve(["half"], { hold: true });
  it.ask("Long");
  await until(() => it.turns.at(-1).text === "half");
  const { id } = it.current;
  it.startNew();
  assert.equal(it.isBusy, false);
  assert.equal(it.isRunning(id), true);
  await it.open(id);
  assert.equal(it.isBusy, true);
  it.stop();
  await until(() => !it.isBusy);
  assert.deepEqual(texts(it), ["Long", "half"]);
  assert.equal(it.turns.at(-1).state, "stopped");
});

test("what had come of an answer is there after the page was left", async () => {
  const archive = new TransientArchive();
  const it = await opened(archive);
  serve(["so far"], { hold: true });
  it.ask("Long");
  await until(() => it.turns.at(-1).text === "so far");
  it.leave();
  const [unsaved] = readUnsaved();
  assert.deepEqual(unsaved.turns.map(({ text, state }) => [text, state]), [["Long", "complete"], ["so far", "stopped"]]);
  // Even if the database has nothing.
  const again = await opened();
  await again.open(unsaved.id);
  assert.deepEqual(texts(again), ["Long", "so far"]);
  assert.deepEqual(again.turns[1].body.messages, [{ role: "user", content: "Long" }]);
  assert.deepEqual(readUnsaved(), []);
});

test("a deleted conversation comes back by undo, and an answer that ends does not bring it back", async () => {
  const it = await opened();
  serve(["half"], { hold: true });
  it.ask("Delete me");
  await until(() => it.turns.at(-1).text === "half");
  const { id } = it.current;
  await it.flush();
  await it.remove([id]);
  assert.deepEqual(texts(it), []);
  await until(() => !it.isRunning(id));
  await it.flush();
  assert.deepEqual(it.list, []);
  await it.undo();
  assert.deepEqual(it.list.map(({ shownTitle }) => shownTitle), ["Delete me"]);
  await it.open(id);
  assert.deepEqual(texts(it), ["Delete me", "half"]);
});

test("conversations are found by their text and their name, and have the name that they were given", async () => {
  serve(["It joins paths.", "It counts."]);
  const it = await opened();
  await ask(it, "What is join?");
  const first = it.current.id;
  it.startNew();
  await ask(it, "What is Counter?");
  assert.deepEqual([...(await it.find("PATHS join"))], [first]);
  await it.rename(first, "  Files ");
  assert.deepEqual([...(await it.find("files"))], [first]);
  assert.deepEqual(it.list.map(({ shownTitle }) => shownTitle).sort(), ["Files", "What is Counter?"]);
});

test("an export is imported elsewhere with its branches, and twice makes no second copy", async () => {
  serve(["one", "two"]);
  const it = await opened();
  await ask(it, "First");
  it.again(it.turns.at(-1));
  await until(() => !it.isBusy);
  const file = await it.export();
  const other = await opened();
  await other.import(file);
  await other.import(file);
  assert.equal(other.list.length, 1);
  await other.open(it.current.id);
  assert.deepEqual(texts(other), ["First", "two"]);
  assert.equal(other.versionsOf(other.turns[1]).length, 2);
});

test("of an import nothing is believed that the page could not have written", () => {
  for (const [text, words] of [
    ["{", /no JSON/], ["[]", /no conversations/], ['{"format": "raystream-conversations", "version": 9, "conversations": []}', /version 9/],
  ]) {
    assert.throws(() => imported(text), (error) => error instanceof ImportError && words.test(error.message));
  }
  const turns = [
    { id: "a", parent: "", role: "user", text: "x", images: ["https://elsewhere.example/a.png", "data:image/png;base64,AAAA"] },
    { id: "b", parent: "a", role: "assistant", text: 7, state: "running", error: { message: "<b>" } },
    { id: "c", parent: "none", role: "user", text: "lost" },
    { id: "a", parent: "b", role: "user", text: "twice" },
    { id: "d", parent: "", role: "system", text: "no role" },
  ];
  const [found] = imported(exported([{ id: "x", title: 1, head: "c", options: { model: "m", top_k: 3 }, turns }]));
  assert.deepEqual(found.turns.map(({ id }) => id), ["a", "b"]);
  assert.deepEqual(found.turns[0].images, ["data:image/png;base64,AAAA"]);
  assert.deepEqual([found.turns[1].text, found.turns[1].state, found.turns[1].error], ["", "stopped", null]);
  assert.deepEqual([found.title, found.head, found.options], ["", "b", { model: "m" }]);
});

test("a storage that is full is told, and the conversation stays", async () => {
  const archive = new TransientArchive();
  const it = await opened(archive);
  archive.write = async () => { throw new DOMException("full", "QuotaExceededError"); };
  serve(["one"]);
  await ask(it, "First");
  await it.flush();
  assert.match(it.problem, /QuotaExceededError.*export it/);
  assert.deepEqual(texts(it), ["First", "one"]);
  browserStorage.write("raystream-unsaved", "");
});
