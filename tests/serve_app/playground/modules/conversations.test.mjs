import assert from "node:assert/strict";
import { test } from "node:test";
import { moduleOf } from "./page.mjs";

/** A browser's channel between its tabs; Node's own keeps the process alive. */
globalThis.BroadcastChannel = class {
  static all = [];

  constructor() {
    BroadcastChannel.all.push(this);
  }

  postMessage(data) {
    for (const each of BroadcastChannel.all) if (each !== this) each.onmessage?.({ data: structuredClone(data) });
  }
};
const { TransientArchive } = await moduleOf("archive");
const { Conversations } = await moduleOf("conversations");
const { forgetUnsaved, readUnsaved } = await moduleOf("journal");
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
  const deadline = performance.now() + 10_000;
  while (!condition()) {
    assert.ok(performance.now() < deadline, `never came: ${condition}`);
    await new Promise((done) => setImmediate(done));
  }
};

/** Await what is under way here, which no timer holds back. */
const settled = async () => {
  for (let step = 0; step < 20; step += 1) await new Promise((done) => setImmediate(done));
};

/** A browser's storage whose room can be filled. */
class FullableArchive extends TransientArchive {
  isFull = false;

  async write(conversation, changed) {
    if (this.isFull) throw new DOMException("full", "QuotaExceededError");
    return super.write(conversation, changed);
  }
}

async function opened(archive = new TransientArchive()) {
  sessionStorage.removeItem("raystream-conversation"); // each is a browser tab of its own
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

test("a storage that is full is told, and what it refused is exported, opened and written once there is room", async () => {
  const archive = new FullableArchive();
  const it = await opened(archive);
  serve(["one", "two", "three"]);
  await ask(it, "First");
  await it.flush();
  const { id } = it.current;
  archive.isFull = true;
  await ask(it, "Second");
  await it.flush();
  assert.match(it.problem, /QuotaExceededError.*export it/);
  const exportedTexts = JSON.parse(await it.export(id)).conversations[0].turns.map(({ text }) => text);
  assert.deepEqual(exportedTexts, ["First", "one", "Second", "two"]);
  it.startNew();
  await it.open(id);
  assert.deepEqual(texts(it), ["First", "one", "Second", "two"]);
  archive.isFull = false;
  await ask(it, "Third");
  await it.flush();
  assert.equal(it.problem, "");
  const again = await opened(archive);
  await again.open(id);
  assert.deepEqual(texts(again), ["First", "one", "Second", "two", "Third", "three"]);
});

test("a conversation that was never written is listed and exported", async () => {
  const archive = new FullableArchive();
  archive.isFull = true;
  const it = await opened(archive);
  serve(["one"]);
  await ask(it, "First");
  await it.flush();
  const [found] = JSON.parse(await it.export()).conversations;
  assert.deepEqual(it.list.map(({ shownTitle }) => shownTitle), ["First"]);
  assert.deepEqual(found.turns.map(({ text }) => text), ["First", "one"]);
});

test("what can't be written by undo, or of a page that was left, is not forgotten", async () => {
  const archive = new FullableArchive();
  const said = [];
  const it = await opened(archive);
  it.announce = (text) => said.push(text);
  serve(["so far"], { hold: true });
  it.ask("First");
  await until(() => it.turns.at(-1).text === "so far");
  const { id } = it.current;
  it.leave();
  await until(() => !it.isBusy);
  await it.remove([id]);
  archive.isFull = true;
  await it.undo();
  assert.equal(said.includes("Restored."), false);
  assert.equal(it.deleted.length, 1);
  const again = await opened(archive);
  assert.equal(readUnsaved().length, 1);
  await again.open(id);
  assert.deepEqual(texts(again), ["First", "so far"]);
  archive.isFull = false;
  await it.undo();
  assert.equal(said.includes("Restored."), true);
  assert.deepEqual([it.deleted, it.list.length], [[], 1]);
  await again.load();
  assert.deepEqual(readUnsaved(), []);
});

test("turns that another tab has added are shown, though a tab that lacks them wrote last", async () => {
  const archive = new TransientArchive();
  const one = await opened(archive);
  serve(["one", "two"]);
  await ask(one, "First");
  await one.flush();
  const other = await opened(archive);
  await other.open(one.current.id);
  await ask(other, "Second");
  await other.flush();
  one.setOptions({ ...one.options, temperature: "0" });
  await one.flush();
  const again = await opened(archive);
  await again.open(one.current.id);
  assert.deepEqual(texts(again), ["First", "one", "Second", "two"]);
});

test("a conversation that another tab deletes is closed here, and comes back whole by its undo", async () => {
  const archive = new TransientArchive();
  const one = await opened(archive);
  serve(["one", "two"], { hold: true });
  await ask(one, "First");
  await one.flush();
  const { id } = one.current;
  const other = await opened(archive);
  await other.open(id);
  one.ask("Second");
  await until(() => one.turns.at(-1).text === "two");
  await one.flush();
  await other.remove([id]);
  await until(() => !one.isRunning(id));
  await settled();
  await one.flush();
  assert.deepEqual([one.turns, one.list, await archive.list()], [[], [], []]);
  assert.match(one.problem, /deleted in another browser tab/);
  await other.undo();
  await until(() => one.list.length === 1);
  await one.open(id);
  assert.deepEqual(texts(one), ["First", "one", "Second", "two"]);
  serve(["three"]);
  await ask(one, "Third");
  await one.flush();
  assert.equal((await archive.read(id)).turns.length, 6);
});

test("a name that another tab gives stays when this tab writes", async () => {
  const archive = new TransientArchive();
  const one = await opened(archive);
  serve(["one", "two"]);
  await ask(one, "First");
  await one.flush();
  const other = await opened(archive);
  await other.rename(one.current.id, "Mine");
  await settled();
  await ask(one, "Second");
  await one.flush();
  assert.deepEqual((await archive.list()).map(({ shownTitle }) => shownTitle), ["Mine"]);
});

test("a page that comes back forgets what it kept when it was left, and a finished answer is never replaced", async () => {
  const archive = new TransientArchive();
  const it = await opened(archive);
  serve(["so far"], { hold: true });
  it.ask("Long");
  await until(() => it.turns.at(-1).text === "so far");
  const { id } = it.current;
  it.leave();
  await until(() => !it.isBusy);
  const kept = browserStorage.read("raystream-unsaved");
  const elsewhere = { ...JSON.parse(kept)[0], id: "elsewhere" };
  await it.load();
  assert.deepEqual(readUnsaved(), []);
  serve([", and the end"]);
  it.resume(it.turns.at(-1));
  await until(() => !it.isBusy);
  await it.flush();
  browserStorage.write("raystream-unsaved", kept);
  const again = await opened(archive);
  await again.open(id);
  assert.deepEqual(texts(again), ["Long", "so far, and the end"]);
  browserStorage.write("raystream-unsaved", JSON.stringify([...JSON.parse(kept), elsewhere]));
  forgetUnsaved(JSON.parse(kept));
  assert.deepEqual(readUnsaved().map((each) => each.id), ["elsewhere"]);
  browserStorage.write("raystream-unsaved", "");
});

test("an export holds no requests, which repeat the turns before them", async () => {
  serve(["one", "two"]);
  const it = await opened();
  await ask(it, "First");
  await ask(it, "Second");
  const { turns } = JSON.parse(await it.export(it.current.id)).conversations[0];
  assert.deepEqual(turns.map(({ body }) => body), [null, null, null, null]);
});

test("of a damaged import what is whole is taken", () => {
  const turns = [{ id: "a", parent: "", role: "user", text: "x", files: [null, { name: "n" }], calls: [null], images: [null] }, null];
  const text = JSON.stringify({
    format: "raystream-conversations", version: 1, conversations: [null, 5, { id: "x", turns }, { id: "y", turns: [] }],
  });
  const found = imported(text);
  assert.deepEqual(found.map(({ id }) => id), ["x"]);
  assert.deepEqual(found[0].turns[0].files, [{ name: "", text: "" }, { name: "n", text: "" }]);
  assert.deepEqual(found[0].turns[0].calls, [{ id: "", name: "", arguments: "", result: "" }]);
});
