// Many texts, classified: how many have each label, a threshold, and the result as CSV.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { ask } from "./api.js";
import { OwnTexts, textsOf } from "./own_texts.js";
import { Code, ErrorNotice, ModelChoice, announce, number } from "./parts.js";
import { download } from "./saving.js";
import { csvOf } from "./table.js";

const BATCH = 128;
const MAX_SHOWN = 200;
export const BELOW = "below the threshold";

/**
 * @typedef {{label: string, scores: {label: string, score: number}[]}} Scored
 *
 * @typedef {{texts: string[], rows: string[][], names: string[], scored: Scored[], labels: string[]}} Found
 */

/** @param {Scored} scored @param {string} label */
export const scoreOf = (scored, label) => scored.scores.find((each) => each.label === label)?.score ?? 0;

/** @param {Scored} scored @param {number} threshold @returns {string} The best label, if its score reaches it. */
export const decided = (scored, threshold) => (scored.scores[0].score >= threshold ? scored.label : BELOW);

/**
 * Return what was found as rows: the user's columns, the label, and the score of each label.
 * @param {Found} found
 * @param {number} threshold
 */
export const resultRows = ({ rows, names, scored, labels }, threshold) => [
  [...names, "label", ...labels.map((label) => `score of ${label}`)],
  ...rows.map((row, index) => [
    ...names.map((_, column) => row[column] ?? ""),
    decided(scored[index], threshold),
    ...labels.map((label) => scoreOf(scored[index], label).toFixed(6)),
  ]),
];

/** @param {{models: {id: string, labels: string[]}[], model: {id: string, labels: string[]},
 *   onModel: (id: string) => void, own: import("./own_texts.js").Own, onOwn: (own: any) => void,
 *   onKey: () => void}} props */
export function ManyTexts({ models, model, onModel, own, onOwn, onKey }) {
  const [found, setFound] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const [progress, setProgress] = useState("");
  const running = useRef(/** @type {AbortController | null} */ (null));
  useEffect(() => () => running.current?.abort(), []);
  const { texts, rows, names } = textsOf(own);
  const run = async (event) => {
    event?.preventDefault();
    running.current?.abort();
    const { signal } = (running.current = new AbortController());
    const scored = [];
    setError(null);
    try {
      for (let start = 0; start < texts.length; start += BATCH) {
        setProgress(`Classifying: ${number(start)} of ${number(texts.length)} texts`);
        const body = { model: model.id, input: texts.slice(start, start + BATCH), truncate: true };
        scored.push(...(await (await ask("v1/classify", { body, signal })).json()).data);
      }
      setFound({ texts, rows, names, scored, labels: model.labels, model: model.id });
      announce(`${texts.length} texts are classified.`);
    } catch (problem) {
      if (!signal.aborted) setError(problem);
    } finally {
      if (running.current?.signal === signal) setProgress("");
    }
  };
  return html`
    <form onSubmit=${run}>
      <${OwnTexts} own=${own} onChange=${onOwn} />
      <p class="detail">Labels of ${model.id}: ${model.labels.join(", ")}</p>
      <div class="row bottom">
        <${ModelChoice} label="Model" models=${models} value=${model.id} onChange=${onModel} />
        ${progress
          ? html`<button type="button" onClick=${() => running.current.abort()}>Stop</button>`
          : html`<button class="primary" disabled=${!texts.length}>Classify</button>`}
      </div>
    </form>
    ${progress && html`<p class="waiting"><span class="dot"></span>${progress}</p>`}
    <${ErrorNotice} error=${error} onRetry=${() => run()} onKey=${onKey} />
    ${found && html`<${Results} found=${found} />`}`;
}

/** @param {{found: Found & {model: string}}} props */
function Results({ found }) {
  const [threshold, setThreshold] = useState("0.5");
  const [shown, setShown] = useState("");
  const least = Number(threshold) || 0;
  const { texts, scored, labels } = found;
  const outcomes = scored.map((each) => decided(each, least));
  const kinds = [...labels, BELOW].map((label) => [label, outcomes.filter((each) => each === label).length]);
  const places = outcomes.flatMap((outcome, index) => (!shown || outcome === shown ? [index] : []));
  const save = () => download("classified.csv", csvOf(resultRows(found, least)), "text/csv");
  return html`
    <section aria-label="Results">
      <div class="row bottom">
        <label class="field short">
          <span>Threshold</span>
          <input type="number" min="0" max="1" step="0.05" value=${threshold}
            onInput=${(event) => setThreshold(event.target.value)} />
        </label>
        <button type="button" onClick=${save}>Save as CSV</button>
      </div>
      <div class="row" role="group" aria-label="Show">
        <button type="button" class="chip" aria-pressed=${!shown} onClick=${() => setShown("")}>
          all <span class="amount">${number(texts.length)}</span></button>
        ${kinds.map(([label, count]) => html`
          <button key=${label} type="button" class="chip" aria-pressed=${label === shown}
            onClick=${() => setShown(label)}>${label} <span class="amount">${number(count)}</span></button>`)}
      </div>
      <div class="scroll" tabindex="0" role="region" aria-label="Classified texts">
        <table>
          <thead><tr><th>Text</th><th>Label</th><th class="amount">Score</th></tr></thead>
          <tbody>
            ${places.slice(0, MAX_SHOWN).map((index) => html`
              <tr key=${index}>
                <td dir="auto" class="own-text">${texts[index]}</td>
                <td>${outcomes[index]}</td>
                <td class="amount">${number(scored[index].scores[0].score, 3)}</td>
              </tr>`)}
          </tbody>
        </table>
      </div>
      ${places.length > MAX_SHOWN && html`
        <p class="detail">The first ${MAX_SHOWN} of ${number(places.length)}; the file holds all.</p>`}
      <${Code} made=${{ kind: "classify", body: { model: found.model, input: texts.slice(0, BATCH), truncate: true } }} />
    </section>`;
}
