// The tab "Compare": one question to two models, or to one with two settings, and the answers next to each other.

import { html, useEffect, useReducer, useRef, useState } from "./vendor/preact.js";
import { messagesOf, newTurn, runAnswer } from "./answer.js";
import { useFollowing } from "./following.js";
import { Icon } from "./icons.js";
import { DEFAULTS, OptionsForm, differences, fieldsOf } from "./options.js";
import { announce } from "./parts.js";
import { tabStorage } from "./storage.js";
import { TextBox, focusBox, isSent } from "./textbox.js";
import { Answer } from "./turn.js";

const STORED = "raystream-compare";
const SIDES = [0, 1];
const NAMES = ["A", "B"];
const WIDE = matchMedia("(min-width: 60rem)");

/**
 * @typedef {import("./answer.js").Turn} Turn
 * @typedef {{question: Turn, answers: Turn[]}} Round A question, and an answer of each side.
 */

/**
 * Return the turns of one side's conversation, up to the question of a round.
 * @param {Round[]} rounds
 * @param {number} side
 * @param {number} index Of the round.
 */
export const turnsOf = (rounds, side, index) => [
  ...rounds.slice(0, index).flatMap(({ question, answers }) => [question, answers[side]]),
  rounds[index].question,
];

/** @returns {{rounds: Round[], options: import("./options.js").Options[]}} */
function restored() {
  const empty = { rounds: [], options: SIDES.map(() => ({ ...DEFAULTS })) };
  try {
    return { ...empty, ...JSON.parse(tabStorage.read(STORED) || "{}") };
  } catch {
    return empty;
  }
}

/** Keep the comparison until the browser tab is closed. */
function keep({ rounds, options }) {
  const ended = (turn) => ({ ...turn, waiting: "", error: null, state: turn.state === "complete" ? "complete" : "stopped" });
  const kept = rounds.map(({ question, answers }) => ({ question, answers: answers.map(ended) }));
  tabStorage.write(STORED, JSON.stringify({ rounds: kept, options }));
}

function useComparison() {
  const state = useRef(/** @type {any} */ (null));
  state.current ??= { ...restored(), running: [null, null], problem: "" };
  const [, redraw] = useReducer((count) => count + 1, 0);
  const it = state.current;

  const run = async (turn, side) => {
    it.running[side]?.abort();
    const running = new AbortController();
    it.running[side] = running;
    const { model } = turn.body;
    await runAnswer(turn, {
      signal: running.signal, onChange: redraw, onNotice: (text) => announce(`${NAMES[side]}, ${model}: ${text}`),
    });
    if (it.running[side] === running) {
      it.running[side] = null;
      announce(`${NAMES[side]}, ${model}: ${turn.error?.message ?? "the answer has ended"}.`);
    }
    keep(it);
    redraw();
  };
  /** Ask these sides for an answer to the last of these rounds. @returns {boolean} Whether they are asked. */
  const answer = (rounds, sides) => {
    const index = rounds.length - 1;
    const round = { ...rounds[index], answers: [...rounds[index].answers] };
    try {
      for (const side of sides) {
        const options = it.options[side];
        const body = { ...fieldsOf(options), messages: messagesOf(turnsOf(rounds, side, index), options.system) };
        round.answers[side] = { ...newTurn("assistant"), body, settings: differences(options) };
      }
    } catch (error) {
      it.problem = error.message;
      redraw();
      return false;
    }
    Object.assign(it, { rounds: [...rounds.slice(0, index), round], problem: "" });
    for (const side of sides) run(round.answers[side], side);
    redraw();
    return true;
  };
  const stop = () => it.running.forEach((each) => each?.abort());
  useEffect(() => {
    const leave = () => {
      stop();
      keep(it);
    };
    addEventListener("pagehide", leave);
    return () => removeEventListener("pagehide", leave);
  }, []);
  return {
    ...it,
    redraw,
    stop,
    isBusy: it.running.some(Boolean),
    ask: (text) => answer([...it.rounds, { question: newTurn("user", text), answers: [] }], SIDES),
    again: (side) => answer(it.rounds, [side]),
    resume: run,
    setOptions(side, options) {
      it.options = it.options.with(side, options);
      redraw();
    },
    clear() {
      stop();
      Object.assign(it, { rounds: [], problem: "" });
      keep(it);
      redraw();
    },
  };
}

/** @param {{models: import("./models.js").Model[], onModels: () => void, onKey: () => void}} props */
export function Compare({ models, onModels, onKey }) {
  const it = useComparison();
  const box = useRef(null);
  const last = it.rounds.at(-1);
  const { talk, end, isAway, toEnd } = useFollowing(it.isBusy, last, models.length > 0);
  useEffect(() => {
    for (const side of SIDES) {
      const isServed = models.some(({ id }) => id === it.options[side].model);
      const model = (models[side] ?? models[0])?.id;
      if (!isServed && model) it.setOptions(side, { ...it.options[side], model });
    }
  }, [models.map(({ id }) => id).join(" ")]);
  const thenWrite = (act) => (...given) => {
    if (act(...given) !== false) focusBox(box.current, talk.current);
  };
  if (!models.length) return html`<p class="empty">No model that generates is served here.</p>`;
  return html`
    <section class="talk compare" ref=${talk} tabindex="-1" aria-label="Comparison">
      <div class="sides">
        ${SIDES.map((side) => html`
          <details class="side" key=${side} open=${WIDE.matches && !it.rounds.length}>
            <summary><${Side} side=${side} options=${it.options[side]} /></summary>
            <${OptionsForm} options=${it.options[side]} models=${models} onModels=${onModels}
              onChange=${(options) => it.setOptions(side, options)} />
          </details>`)}
      </div>
      ${!it.rounds.length && html`
        <div class="welcome">
          <h2>Ask two at once</h2>
          <p>One question, two answers next to each other, each with its speed.
            ${models.length === 1 && ` Only ${models[0].id} generates here, so give the sides different settings.`}</p>
        </div>`}
      <div class="turns" role="log" aria-live="off" aria-label="Answers">
        ${it.rounds.map((round, index) => html`
          <${Compared} key=${index} round=${round} onKey=${onKey} onChange=${it.redraw}
            onRetry=${round === last ? thenWrite(it.again) : undefined}
            onResume=${round === last ? (turn, side) => thenWrite(() => void it.resume(turn, side))() : undefined} />`)}
      </div>
      <${Composer} it=${it} box=${box} onClear=${thenWrite(it.clear)} onEnd=${isAway && last ? toEnd : undefined} />
      <div ref=${end}></div>
    </section>`;
}

const Side = ({ side, options }) => html`
  <span class="letter">${NAMES[side]}</span> <strong>${options.model}</strong>
  <${Settings} text=${differences(options)} />`;

/** What differs from a model's default, in a line below its name. */
const Settings = ({ text }) => text && html`<span class="detail differences">${text}</span>`;

/** Only the last round can be answered again: the later questions go on from the answers before them. */
function Compared({ round: { question, answers }, onRetry, onResume, onKey, onChange }) {
  return html`
    <article class="turn question" aria-label="Question"><p class="asked" dir="auto">${question.text}</p></article>
    <div class="sides">
      ${answers.map((turn, side) => {
        const canResume = onResume && turn.error?.code === "connection_lost" && turn.lastEventId;
        return html`
          <section class="side" key=${side} aria-label=${`${NAMES[side]}: ${turn.body.model}`}>
            <p class="detail"><span class="letter">${NAMES[side]}</span> ${turn.body.model}
              <${Settings} text=${turn.settings} /></p>
            <${Answer} turn=${turn} onKey=${onKey} onChange=${onChange} onRetry=${onRetry && (() => onRetry(side))}
              onResume=${canResume ? () => onResume(turn, side) : undefined} />
          </section>`;
      })}
    </div>`;
}

function Composer({ it, box, onClear, onEnd }) {
  const [text, setText] = useState("");
  const send = (event) => {
    event?.preventDefault();
    if (!it.isBusy && text.trim() && it.ask(text.trim())) setText("");
  };
  const onKeyDown = (event) => {
    if (isSent(event)) send(event);
  };
  return html`
    <form class="composer" onSubmit=${send}>
      ${onEnd && html`
        <button type="button" class="to-end" onClick=${onEnd}><${Icon} name="down" />To the end</button>`}
      ${it.problem && html`<p class="problem" role="alert">${it.problem}</p>`}
      <label class="field">
        <span class="unseen">Your question to both</span>
        <${TextBox} text=${text} box=${box} aria-keyshortcuts="/" placeholder="Ask both" onKeyDown=${onKeyDown}
          onInput=${(event) => setText(event.target.value)} />
      </label>
      <div class="row">
        ${it.rounds.length > 0 && html`
          <button type="button" class="quiet" aria-keyshortcuts="n" onClick=${onClear}>
            <${Icon} name="plus" />New comparison</button>`}
        <span class="push"></span>
        ${it.isBusy
          ? html`<button type="button" class="primary" aria-keyshortcuts="Escape" onClick=${it.stop}>
              <${Icon} name="stop" />Stop both</button>`
          : html`<button class="primary"><${Icon} name="send" />Ask both</button>`}
      </div>
    </form>`;
}
