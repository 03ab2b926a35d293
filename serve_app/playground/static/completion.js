// A base model, which has no chat template, goes on with a text: one text, which its user and the model write.

import { html, useEffect, useReducer, useRef, useState } from "./vendor/preact.js";
import { newTurn, runAnswer } from "./answer.js";
import { fieldsOf } from "./options.js";
import { Code, ErrorNotice, announce } from "./parts.js";
import { browserStorage } from "./storage.js";
import { focusBox } from "./textbox.js";
import { Figures } from "./turn.js";

const STORED = "raystream-completion";
const MAX_UNDO = 50;
/** Browsers keep some five million characters of a site. */
const MAX_UNDO_CHARS = 1_000_000;
const WRITE_MS = 500;
const MAX_TOKENS = 128;

/** @typedef {{text: string, before: string[]}} Draft The text, and what it was before each continuation. */

/** @returns {Draft} */
export function readDraft() {
  try {
    const { text, before } = JSON.parse(browserStorage.read(STORED) || "{}");
    return { text: String(text ?? ""), before: Array.isArray(before) ? before.map(String) : [] };
  } catch {
    return { text: "", before: [] };
  }
}

/**
 * @param {Draft} draft Kept until its user clears it; without the texts before, if the browser is full.
 * @returns {boolean} Whether the browser keeps the text.
 */
export const keepDraft = (draft) => written(draft) || written({ ...draft, before: [] });

const written = (draft) => browserStorage.write(STORED, draft.text ? JSON.stringify(draft) : "");

/** @param {string[]} before @returns {string[]} The latest of them: at least one, and as many as are kept. */
export function undoable(before) {
  let chars = 0;
  const tooMany = before.findLastIndex((text, index) => {
    chars += text.length;
    return index < before.length - 1 && (chars > MAX_UNDO_CHARS || index < before.length - MAX_UNDO);
  });
  return before.slice(tooMany + 1);
}

/** A text, which is kept every half second while it grows. */
export class KeptDraft {
  draft = readDraft();
  /** Whether the browser keeps it. */
  isKept = true;
  #timer = 0;
  #onKept;

  /** @param {() => void} onKept Called when `isKept` has changed. */
  constructor(onKept) {
    this.#onKept = onKept;
  }

  /** @param {Partial<Draft>} changed */
  change(changed) {
    this.draft = { ...this.draft, ...changed };
    this.#timer ||= setTimeout(() => this.flush(), WRITE_MS);
  }

  /** Keep at once what has changed. */
  flush() {
    if (!this.#timer) return;
    clearTimeout(this.#timer);
    this.#timer = 0;
    const wasKept = this.isKept;
    this.isKept = keepDraft(this.draft);
    if (this.isKept !== wasKept) this.#onKept();
  }
}

/**
 * @param {{model: {id: string}, options: import("./options.js").Options, onKey: () => void}} props
 */
export function Completion({ model, options, onKey }) {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const [problem, setProblem] = useState("");
  const it = useRef(/** @type {any} */ (null));
  const area = useRef(null);
  it.current ??= { kept: new KeptDraft(redraw), turn: null, aborting: null };
  const { turn, kept } = it.current;
  const { draft, isKept } = kept;
  const isBusy = turn?.state === "running";
  const set = (changed) => {
    kept.change(changed);
    redraw();
  };
  useEffect(() => {
    const leave = () => {
      it.current.aborting?.abort();
      kept.flush();
    };
    addEventListener("pagehide", leave);
    if (document.activeElement === document.body) focusBox(area.current);
    return () => {
      removeEventListener("pagehide", leave);
      leave();
    };
  }, []);

  const run = async (from, before) => {
    const started = newTurn("assistant");
    try {
      const { response_format: format, tools, tool_choice: choice, ...fields } = fieldsOf(options);
      started.body = { max_tokens: MAX_TOKENS, ...fields, model: model.id, prompt: from };
    } catch (error) {
      return setProblem(error.message);
    }
    setProblem("");
    it.current.aborting?.abort();
    const aborting = new AbortController();
    Object.assign(it.current, { turn: started, aborting });
    set({ text: from, before: undoable(before) });
    announce("The text goes on.");
    await runAnswer(started, {
      signal: aborting.signal, path: "v1/completions", onNotice: announce,
      onChange: () => it.current.turn === started && set({ text: from + started.text }),
    });
    if (it.current.turn !== started) return undefined;
    kept.flush();
    announce(started.error ? started.error.message : `${started.usage?.completion_tokens ?? 0} tokens were added.`);
    redraw();
    return area.current?.focus();
  };
  const goOn = (event) => {
    event?.preventDefault();
    if (!isBusy && draft.text) run(draft.text, [...draft.before, draft.text]);
  };
  const again = () => run(draft.before.at(-1), draft.before);
  const undo = () => set({ text: draft.before.at(-1), before: draft.before.slice(0, -1) });
  const onKeyDown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) goOn(event);
  };
  const canGoBack = !isBusy && draft.before.length > 0;
  return html`
    <section class="completion" aria-label="Completion">
      <h2>Go on with a text</h2>
      <p class="detail">${model.id} is a base model: it has no chat template and answers no questions. It continues the
        text below. ${isKept ? "The text is kept in this browser." : "This browser does not keep the text: copy it."}</p>
      <form onSubmit=${goOn}>
        <label class="field">
          <span>Text to continue</span>
          <textarea ref=${area} rows="14" dir="auto" value=${draft.text} readonly=${isBusy} aria-busy=${isBusy}
            onKeyDown=${onKeyDown} onInput=${(event) => set({ text: event.target.value })}></textarea>
        </label>
        ${problem && html`<p class="problem" role="alert">${problem}</p>`}
        <div class="row">
          ${isBusy
            ? html`<button type="button" class="primary" onClick=${() => it.current.aborting.abort()}>Stop</button>`
            : html`<button class="primary" disabled=${!draft.text} title="Ctrl+Enter">Continue</button>`}
          <button type="button" class="quiet" disabled=${!canGoBack} onClick=${undo}>Undo</button>
          <button type="button" class="quiet" disabled=${!canGoBack} onClick=${again}>Continue otherwise</button>
          <span class="push"></span>
          ${turn?.body && html`<${Code} made=${{ kind: "completion", body: { ...turn.body, stream: true } }} />`}
        </div>
      </form>
      ${turn?.waiting && html`<p class="waiting"><span class="dot"></span>${turn.waiting}</p>`}
      ${turn && html`
        <${ErrorNotice} error=${turn.error} onRetry=${goOn} onKey=${onKey} />
        <${Figures} turn=${turn} />`}
    </section>`;
}
