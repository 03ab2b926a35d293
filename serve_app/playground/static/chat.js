// The tab "Chat": a conversation with a model that generates.

import { html, useEffect, useReducer, useRef, useState } from "./vendor/preact.js";
import { messagesOf, newTurn, runAnswer } from "./answer.js";
import { readImages } from "./images.js";
import { DEFAULTS, OptionsForm, fieldsOf } from "./options.js";
import { announce } from "./parts.js";
import { tabStorage } from "./storage.js";
import { Answer, Question, ToolResult } from "./turn.js";

const STORED = "raystream-chat";
const LONGEST_SPOKEN = 400;
const EXAMPLES = ["What does os.path.join do?", "What is textwrap.indent?", "And collections.Counter?"];

/** @returns {{turns: import("./answer.js").Turn[], options: import("./options.js").Options}} */
function restored() {
  try {
    const { turns, options } = JSON.parse(tabStorage.read(STORED) || "{}");
    return { turns: turns ?? [], options: { ...DEFAULTS, ...options } };
  } catch {
    return { turns: [], options: { ...DEFAULTS } };
  }
}

/** Keep the conversation until the browser tab is closed, so that a reload loses nothing. */
function keep(turns, options) {
  const kept = turns.map((turn) => ({
    ...turn,
    waiting: "",
    state: turn.state === "running" ? "stopped" : turn.state,
    error: turn.error && { ...turn.error, message: turn.error.message },
  }));
  // Many large pictures don't fit; then a reload begins anew.
  tabStorage.write(STORED, JSON.stringify({ turns: kept, options }));
}

/** The conversation, and what can be done with it. */
function useConversation() {
  const state = useRef(/** @type {any} */ (null));
  state.current ??= { ...restored(), running: null, problem: "" };
  const [, redraw] = useReducer((count) => count + 1, 0);
  const it = state.current;

  /** Stream an answer. One runs at a time: an answer that still runs is stopped. */
  const run = async (turn) => {
    it.running?.abort();
    const running = new AbortController();
    Object.assign(it, { running, problem: "" });
    announce("The answer begins.");
    await runAnswer(turn, { signal: running.signal, onChange: redraw, onNotice: announce });
    if (it.running === running) {
      it.running = null;
      announce(spoken(turn));
    }
    keep(it.turns, it.options);
    redraw();
  };
  /**
   * Make these turns the conversation, and ask for the answer to them.
   * @param {import("./answer.js").Turn[]} turns
   * @returns {boolean} Whether it is asked for; if an option can't be read, the conversation stays as it was.
   */
  const answer = (turns) => {
    const turn = newTurn("assistant");
    try {
      turn.body = { ...fieldsOf(it.options), messages: messagesOf(turns, it.options.system) };
    } catch (error) {
      it.problem = error.message;
      redraw();
      return false;
    }
    it.turns = [...turns, turn];
    run(turn);
    redraw();
    return true;
  };
  const before = (turn) => it.turns.slice(0, it.turns.indexOf(turn));

  useEffect(() => {
    const leave = () => {
      it.running?.abort();
      keep(it.turns, it.options);
    };
    addEventListener("pagehide", leave);
    return () => removeEventListener("pagehide", leave);
  }, []);

  return {
    ...it,
    redraw,
    stop: () => it.running?.abort(),
    setOptions(options) {
      it.options = options;
      redraw();
    },
    ask: (text, images) => answer([...it.turns, newTurn("user", text, images)]),
    edit: (turn, text) => answer([...before(turn), newTurn("user", text, turn.images)]),
    again: (turn) => answer(before(turn)),
    resume: run,
    sendResults(turn) {
      const results = turn.calls.map(({ id, result }) => ({ ...newTurn("tool", result), callId: id }));
      return answer([...it.turns, ...results]);
    },
    clear() {
      it.running?.abort();
      Object.assign(it, { turns: [], problem: "" });
      keep(it.turns, it.options);
      redraw();
    },
  };
}

/** @param {import("./answer.js").Turn} turn What a screen reader says of it once it has ended. */
function spoken({ state, text, error, usage }) {
  if (state === "failed") return error.message;
  const tokens = `${usage?.completion_tokens ?? 0} tokens`;
  if (state === "stopped") return `Stopped after ${tokens}.`;
  return text.length <= LONGEST_SPOKEN ? `Answer: ${text}` : `The answer is complete, ${tokens}.`;
}

/**
 * @param {{models: {id: string, accepts_images: boolean}[], onKey: () => void}} props
 */
export function Chat({ models, onKey }) {
  const it = useConversation();
  const end = useRef(null);
  const isBusy = Boolean(it.running);
  const chosen = models.find(({ id }) => id === it.options.model) ?? models[0];
  useEffect(() => {
    if (chosen && chosen.id !== it.options.model) it.setOptions({ ...it.options, model: chosen.id });
  }, [chosen?.id]);
  useFollowing(end, isBusy);
  const last = it.turns.at(-1);
  return html`
    <div class="chat">
      <section class="talk" aria-label="Conversation">
        ${!it.turns.length && html`<${Welcome} onAsk=${(text) => it.ask(text, [])} model=${chosen?.id} />`}
        <div class="turns" role="log" aria-live="off" aria-label="Messages">
          ${it.turns.map((turn, index) => {
            if (turn.role === "user") {
              return html`<${Question} key=${index} turn=${turn} isBusy=${isBusy}
                onEdit=${(text) => it.edit(turn, text)} />`;
            }
            if (turn.role === "tool") return html`<${ToolResult} key=${index} turn=${turn} />`;
            const canResume = turn === last && turn.error?.code === "connection_lost" && turn.lastEventId;
            return html`<${Answer} key=${index} turn=${turn} onKey=${onKey} onChange=${it.redraw}
              onRetry=${() => it.again(turn)} onResume=${canResume ? () => it.resume(turn) : undefined}
              onResults=${turn === last && !isBusy && turn.calls.length ? () => it.sendResults(turn) : undefined} />`;
          })}
        </div>
        <div ref=${end}></div>
        <${Composer} it=${it} isBusy=${isBusy} takesImages=${Boolean(chosen?.accepts_images)}
          isReady=${Boolean(chosen)} />
      </section>
      <${Settings}>
        <${OptionsForm} options=${it.options} models=${models} onChange=${it.setOptions} />
      <//>
    </div>`;
}

/** Scroll with a growing answer while the reader is at its end. */
function useFollowing(end, isBusy) {
  useEffect(() => {
    if (!isBusy) return undefined;
    let frame = 0;
    const follow = () => {
      const distance = end.current?.getBoundingClientRect().top - innerHeight;
      if (distance > -400 && distance < 240) end.current.scrollIntoView({ block: "end" });
      frame = requestAnimationFrame(follow);
    };
    frame = requestAnimationFrame(follow);
    return () => cancelAnimationFrame(frame);
  }, [isBusy]);
}

const WIDE = matchMedia("(min-width: 60rem)");

function Settings({ children }) {
  const [isWide, setWide] = useState(WIDE.matches);
  useEffect(() => {
    const note = () => setWide(WIDE.matches);
    WIDE.addEventListener("change", note);
    return () => WIDE.removeEventListener("change", note);
  }, []);
  return html`
    <aside class="settings" aria-label="Settings">
      <details open=${isWide}>
        <summary>Settings</summary>
        ${children}
      </details>
    </aside>`;
}

const Welcome = ({ onAsk, model }) => html`
  <div class="welcome">
    <h2>Ask ${model ?? "a model"}</h2>
    <p>Answers stream as they are generated. This page talks to this server only.</p>
    ${model === "pydoc-chat" && html`
      <p>This small model recites the documentation of Python's standard library, and names plain drawn shapes.</p>
      <p class="row">
        ${EXAMPLES.map((each) => html`
          <button type="button" class="chip" onClick=${() => onAsk(each)}>${each}</button>`)}
      </p>`}
  </div>`;

function Composer({ it, isBusy, takesImages, isReady }) {
  const [text, setText] = useState("");
  const [images, setImages] = useState(/** @type {string[]} */ ([]));
  const [problem, setProblem] = useState("");
  const add = async (files) => {
    const found = await readImages(files);
    setProblem(found.problem);
    setImages((before) => [...before, ...found.uris]);
  };
  const send = (event) => {
    event?.preventDefault();
    if (isBusy || !isReady || !(text.trim() || images.length)) return;
    if (!it.ask(text.trim(), images)) return;
    setText("");
    setImages([]);
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  const onPaste = (event) => {
    const files = [...event.clipboardData.files];
    if (takesImages && files.length) {
      event.preventDefault();
      add(files);
    }
  };
  // Text that is dropped is the browser's matter.
  const onDragOver = (event) => {
    if (event.dataTransfer.types.includes("Files")) event.preventDefault();
  };
  const onDrop = (event) => {
    const files = [...event.dataTransfer.files];
    if (!files.length) return;
    event.preventDefault();
    if (takesImages) add(files);
  };
  return html`
    <form class="composer" onSubmit=${send} onDragOver=${onDragOver} onDrop=${onDrop}>
      ${(it.problem || problem) && html`<p class="problem" role="alert">${it.problem || problem}</p>`}
      ${images.length > 0 && html`
        <ul class="attached" aria-label="Attached pictures">
          ${images.map((url, index) => html`
            <li key=${index}>
              <img src=${url} alt=${`Picture ${index + 1}`} />
              <button type="button" class="quiet" aria-label=${`Remove picture ${index + 1}`}
                onClick=${() => setImages(images.filter((_, each) => each !== index))}>×</button>
            </li>`)}
        </ul>`}
      <label class="field">
        <span class="unseen">Your message</span>
        <textarea rows="2" value=${text} onKeyDown=${onKeyDown} onPaste=${onPaste}
          placeholder=${takesImages ? "Write a message; paste or drop a picture" : "Write a message"}
          onInput=${(event) => setText(event.target.value)}></textarea>
      </label>
      <div class="row">
        ${takesImages && html`
          <label class="button quiet">
            <input type="file" class="unseen" accept="image/png,image/jpeg,image/webp,image/gif" multiple
              onChange=${(event) => { add([...event.target.files]); event.target.value = ""; }} />
            Add a picture
          </label>`}
        ${it.turns.length > 0 && html`
          <button type="button" class="quiet" onClick=${it.clear}>New chat</button>`}
        <span class="push"></span>
        ${isBusy
          ? html`<button type="button" class="primary" onClick=${it.stop}>Stop</button>`
          : html`<button class="primary" disabled=${!isReady}>Send</button>`}
      </div>
    </form>`;
}
