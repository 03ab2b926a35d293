// The tab "Classify": a text in coloured pieces, with the scores of each.

import { html, useRef, useState } from "./vendor/preact.js";
import { ask } from "./api.js";
import { ManyTexts, scoreOf } from "./many.js";
import { NO_TEXTS, Switch } from "./own_texts.js";
import { Code, ErrorNotice, ModelChoice, announce, number } from "./parts.js";

const EXAMPLE =
  "If the form is sent twice, only the first of the two is kept, and the other is dropped without a word " +
  "to the person who has sent it. Return a filename or tuple containing over an existing directory. The " +
  "file is called for each member, use.er. for general use. The bytes of the object are given as the " +
  "memory of the string, or the default of encoding of this.\n\nWe moved to a smaller house by the river " +
  "that year, and for the first time in my life I could hear the trains at night.";
const PIECE_CHARS = 160;
const KINDS = { one: "One text, in pieces", many: "Many texts" };

/**
 * @param {{models: {id: string, labels: string[]}[], onKey: () => void}} props
 */
export function Classify({ models, onKey }) {
  const [text, setText] = useState(EXAMPLE);
  const [chars, setChars] = useState(String(PIECE_CHARS));
  const [kind, setKind] = useState("one");
  const [own, setOwn] = useState(NO_TEXTS);
  const [chosen, setChosen] = useState("");
  const [found, setFound] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const [isBusy, setBusy] = useState(false);
  const latest = useRef(0);
  const model = models.find(({ id }) => id === chosen) ?? models[0];
  if (!model) return html`<p class="empty">No model that classifies is served here.</p>`;

  const run = async (event) => {
    event?.preventDefault();
    const body = { model: model.id, input: text, split: { max_chars: Number(chars) || PIECE_CHARS }, truncate: true };
    const turn = ++latest.current;
    setBusy(true);
    setError(null);
    try {
      const begun = performance.now();
      const answer = await (await ask("v1/classify", { body })).json();
      if (turn !== latest.current) return;
      const [scored] = answer.data;
      setFound({ body, text, scored, labels: model.labels, ms: performance.now() - begun, usage: answer.usage });
      announce(`${scored.pieces.length} pieces. The whole: ${scored.label}, ${percent(scored.scores[0].score)}.`);
    } catch (problem) {
      setError(problem);
    } finally {
      setBusy(false);
    }
  };
  const choice = html`
    <h2>Classify texts</h2>
    <${Switch} label="What to classify" choices=${KINDS} value=${kind} onChange=${setKind} />`;
  if (kind === "many") {
    return html`
      <div class="sheet">
        ${choice}
        <${ManyTexts} models=${models} model=${model} onModel=${setChosen} own=${own} onOwn=${setOwn} onKey=${onKey} />
      </div>`;
  }
  return html`
    <div class="sheet">
      ${choice}
      <form onSubmit=${run}>
        <label class="field">
          <span>Text</span>
          <textarea rows="7" value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
        </label>
        <div class="row bottom">
          <${ModelChoice} label="Model" models=${models} value=${model.id} onChange=${setChosen} />
          <label class="field short">
            <span>Characters of a piece</span>
            <input type="number" min="1" step="1" value=${chars} onInput=${(event) => setChars(event.target.value)} />
          </label>
          <button class="primary" disabled=${isBusy || !text.trim()}>Classify</button>
        </div>
      </form>
      <${ErrorNotice} error=${error} onRetry=${() => run()} onKey=${onKey} />
      ${found && html`<${Result} found=${found} />`}
    </div>`;
}

/** @param {number} score */
const percent = (score) => `${number(score * 100, 1)} %`;

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const NUM_COLOURS = 6;

/** A label's mark: a letter and a colour, so that nothing is told by colour only. */
const markOf = (labels, label) => {
  const index = Math.max(0, labels.indexOf(label));
  return { letter: LETTERS[index % LETTERS.length], colour: `label-${index % NUM_COLOURS}` };
};

function Result({ found }) {
  const { scored, text, labels, ms, usage, body } = found;
  const points = Array.from(text); // the server counts code points
  let at = 0;
  return html`
    <section aria-label="Result">
      <h3>The whole: <em>${scored.label}</em></h3>
      <ul class="legend">
        ${scored.scores.map(({ label, score }) => {
          const { letter, colour } = markOf(labels, label);
          return html`
            <li key=${label}>
              <span class=${`swatch ${colour}`} aria-hidden="true">${letter}</span>
              <span>${label}</span>
              <meter min="0" max="1" value=${score} aria-label=${label}></meter>
              <span class="amount">${percent(score)}</span>
            </li>`;
        })}
      </ul>
      <p class="pieces" dir="auto">
        ${scored.pieces.map((piece, index) => {
          const start = Math.max(at, piece.start);
          at = piece.end;
          const shown = points.slice(start, at).join("");
          const { letter, colour } = markOf(labels, piece.label);
          const best = piece.scores[0].score;
          const strength = best > 0.8 ? "strong" : "weak";
          return html`<mark key=${index}
              class=${`${colour} ${strength}`}>${shown.trimEnd()}<span
              class="score"> ${letter} ${number(best, 2)}</span></mark>${shown.slice(shown.trimEnd().length)}`;
        })}
      </p>
      <p class="detail">A pale piece has a score of at most 0.80.</p>
      <dl class="figures">
        <div><dt>Pieces</dt><dd>${scored.pieces.length}</dd></div>
        <div><dt>Tokens</dt><dd>${number(usage.prompt_tokens)}</dd></div>
        <div><dt>Took</dt><dd>${number(ms)} ms</dd></div>
      </dl>
      <details>
        <summary>Scores of each piece</summary>
        <div class="scroll" tabindex="0" role="region" aria-label="Scores of each piece">
          <table>
            <thead><tr><th>Piece</th>${labels.map((label) => html`<th class="amount">${label}</th>`)}</tr></thead>
            <tbody>
              ${scored.pieces.map((piece, index) => html`
                <tr key=${index}>
                  <td dir="auto">${index + 1}. ${points.slice(piece.start, piece.start + 40).join("")}…</td>
                  ${labels.map((label) => html`
                    <td class="amount">${number(scoreOf(piece, label), 3)}</td>`)}
                </tr>`)}
            </tbody>
          </table>
        </div>
      </details>
      <${Code} made=${{ kind: "classify", body }} />
    </section>`;
}
