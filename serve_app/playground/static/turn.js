// One turn of a conversation on the page: a question, an answer with its figures, a tool's result.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";
import { figuresOf } from "./answer.js";
import { AskedFiles } from "./attached.js";
import { Icon } from "./icons.js";
import { blocksOf, isRendered } from "./markdown.js";
import { Code, CopyButton, ErrorNotice, duration, number } from "./parts.js";
import { drawProse } from "./prose.js";
import { TextBox, focusBox, isSent } from "./textbox.js";

/** Between two drawings of a growing text pass this many ms, and this many times as long as the last one took. */
const PAUSE_MS = 16;
const PAUSE_OF_DRAWING = 4;

/**
 * Return a text that follows another one, at a pace that leaves the page time for all else.
 * @param {string} text
 * @param {boolean} isRunning
 * @param {{current: number}} drawingMs How long the last drawing took.
 */
function usePaced(text, isRunning, drawingMs) {
  const [shown, setShown] = useState(text);
  const latest = useRef(text);
  const timer = useRef(0);
  latest.current = text;
  useEffect(() => {
    if (!isRunning) setShown(text);
    else if (!timer.current) {
      timer.current = setTimeout(() => {
        timer.current = 0;
        setShown(latest.current);
      }, PAUSE_MS + PAUSE_OF_DRAWING * drawingMs.current);
    }
  }, [text, isRunning]);
  useEffect(() => () => clearTimeout(timer.current), []);
  return isRunning ? shown : text;
}

/** A model's text: rendered, or as it is if it is long. */
export function ModelText({ text, isRunning = false }) {
  const begunMs = performance.now();
  const drawingMs = useRef(0);
  const shown = usePaced(text, isRunning, drawingMs);
  useLayoutEffect(() => {
    drawingMs.current = performance.now() - begunMs;
  }, [shown]);
  if (isRendered(shown)) return html`<${Markdown} text=${shown} isRunning=${isRunning} />`;
  return html`
    <div class="prose plain" dir="auto">
      ${blocksOf(shown).map((block, index) => html`<div key=${index}>${block}</div>`)}
    </div>`;
}

function Markdown({ text, isRunning }) {
  const element = useRef(null);
  useLayoutEffect(() => drawProse(element.current, text, isRunning), [text, isRunning]);
  return html`<div class="prose" dir="auto" ref=${element}></div>`;
}

/**
 * @param {{turn: import("./answer.js").Turn, onRetry?: () => void, onResume?: () => void, onKey: () => void,
 *   onResults?: () => void, onChange: () => void, versions?: any}} props `versions` switches between answers.
 */
export function Answer({ turn, onRetry, onResume, onKey, onResults, onChange, versions }) {
  const isRunning = turn.state === "running";
  return html`
    <article class="turn answer" aria-label="Answer" aria-busy=${isRunning}>
      ${turn.reasoning && html`
        <details class="reasoning" open=${isRunning && !turn.text}>
          <summary>Reasoning</summary>
          <${ModelText} key=${turn.id} text=${turn.reasoning} isRunning=${isRunning} />
        </details>`}
      ${turn.text
        ? html`<${ModelText} key=${turn.id} text=${turn.text} isRunning=${isRunning} />`
        : isRunning && !turn.calls.length && html`<p class="pending">…</p>`}
      ${turn.calls.map((call, index) => html`
        <${ToolCall} key=${index} call=${call} onChange=${onChange} canAnswer=${Boolean(onResults)} />`)}
      ${onResults && turn.calls.length > 0 && html`
        <p class="row"><button type="button" class="primary" onClick=${onResults}>Send the results</button></p>`}
      ${turn.waiting && html`<p class="waiting"><span class="dot"></span>${turn.waiting}</p>`}
      ${turn.marks.map(({ text, tokens }) => html`
        <p class="mark">↪ After ${counted(tokens)} the answer ${text}${turn.state === "complete"
          && "; nothing was lost"}.</p>`)}
      ${turn.state === "stopped" && html`<p class="mark">Stopped here.</p>`}
      ${turn.finish === "length" && html`<p class="mark">The limit of tokens ends the answer here.</p>`}
      <${ErrorNotice} error=${turn.error} onKey=${onKey}
        onRetry=${onResume ?? onRetry} label=${onResume ? "Go on" : "Try again"} />
      <${Figures} turn=${turn} />
      ${!isRunning && html`
        <div class="row actions">
          ${versions}
          ${onResume && turn.state === "stopped" && html`
            <button type="button" class="quiet" onClick=${onResume}>Go on</button>`}
          ${onRetry && html`
            <button type="button" class="quiet" aria-keyshortcuts="r" onClick=${onRetry}>
              <${Icon} name="again" />Answer again</button>`}
          ${turn.text && html`<${CopyButton} text=${turn.text} label="Copy" keys="c" />`}
          ${turn.body && html`<${Code} made=${{ kind: "chat", body: { ...turn.body, stream: true } }} />`}
        </div>`}
    </article>`;
}

export function Figures({ turn }) {
  const found = figuresOf(turn);
  if (found.ttftMs === null) return null;
  const shown = [
    ["First token after", duration(found.ttftMs)],
    ["Speed", found.tokensPerS === null ? null : `${number(found.tokensPerS)} tokens/s`],
    ["Answer", counted(found.tokens)],
    ["Reasoning", found.reasoningTokens ? counted(found.reasoningTokens) : null],
    ["Prompt", found.promptTokens === null ? null : promptText(found)],
  ];
  return html`
    <dl class="figures">
      ${shown.filter(([, value]) => value !== null).map(([name, value]) => html`
        <div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
    </dl>`;
}

/** @param {number} tokens */
const counted = (tokens) => `${number(tokens)} token${tokens === 1 ? "" : "s"}`;

const promptText = ({ promptTokens, cachedTokens }) =>
  `${counted(promptTokens)}${cachedTokens ? `, ${number(cachedTokens)} cached` : ""}`;

function ToolCall({ call, onChange, canAnswer }) {
  const set = (event) => {
    call.result = event.target.value;
    onChange();
  };
  return html`
    <section class="call" aria-label=${`Call of ${call.name}`}>
      <p><span class="tag">calls</span> <code>${call.name}</code></p>
      <pre tabindex="0" role="region" aria-label="Arguments"><code>${call.arguments}</code></pre>
      ${canAnswer && html`
        <label class="field">
          <span>Result of ${call.name}</span>
          <textarea class="mono" rows="2" value=${call.result} onInput=${set}></textarea>
        </label>`}
    </section>`;
}

/**
 * @param {{turn: import("./answer.js").Turn, onEdit: (text: string) => boolean, isBusy: boolean,
 *   versions?: any}} props
 */
export function Question({ turn, onEdit, isBusy, versions }) {
  const [draft, setDraft] = useState(/** @type {string | null} */ (null));
  const box = useRef(null);
  const button = useRef(null);
  const wasEdited = useRef(false);
  const isEdited = draft !== null;
  useLayoutEffect(() => {
    if (isEdited) focusBox(box.current, box.current);
    else if (wasEdited.current && document.activeElement === document.body) button.current?.focus();
    wasEdited.current = isEdited;
  }, [isEdited]);
  const send = (event) => {
    event.preventDefault();
    if (onEdit(draft ?? "")) setDraft(null);
  };
  const onKeyDown = (event) => {
    if (event.key === "Escape") setDraft(null);
    else if (event.target === box.current && isSent(event)) send(event);
    else return;
    event.stopPropagation();
  };
  return html`
    <article class="turn question" aria-label="Question">
      ${turn.images.map((url, index) => html`<img key=${index} src=${url} alt=${`Attached picture ${index + 1}`} />`)}
      <${AskedFiles} files=${turn.files} />
      ${draft === null
        ? html`<div class="row">
            ${onEdit && html`
              <button type="button" class="quiet" ref=${button} disabled=${isBusy} aria-keyshortcuts="e"
                onClick=${() => setDraft(turn.text)}><${Icon} name="edit" />Edit</button>`}
            <p class="asked" dir="auto">${turn.text}</p>
          </div>
          ${versions}`
        : html`<form onSubmit=${send} onKeyDown=${onKeyDown}>
            <label class="field">
              <span class="unseen">Edit the question</span>
              <${TextBox} text=${draft} box=${box} onInput=${(event) => setDraft(event.target.value)} />
            </label>
            <p class="row">
              <button class="primary">Ask again</button>
              <button type="button" class="quiet" onClick=${() => setDraft(null)}>Leave it</button>
            </p>
          </form>`}
    </article>`;
}

/** @param {{turn: import("./answer.js").Turn}} props */
export const ToolResult = ({ turn }) => html`
  <article class="turn question result" aria-label="Result of a call">
    <p><span class="tag">result</span></p>
    <pre tabindex="0" role="region" aria-label="Result"><code>${turn.text}</code></pre>
  </article>`;
