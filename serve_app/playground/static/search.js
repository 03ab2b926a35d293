// The tab "Search": the standard library by meaning, and an answer about the best entry.

import { html, useEffect, useReducer, useRef, useState } from "./vendor/preact.js";
import { newTurn, runAnswer } from "./answer.js";
import { embed, embedAll, loadEntries, nearest } from "./library.js";
import { Code, ErrorNotice, ModelChoice, announce, number } from "./parts.js";
import { Answer } from "./turn.js";

const NUM_HITS = 8;
const NUM_ENTRIES = "6,450";
const EXAMPLES = ["join the parts of a path", "remove whitespace at both ends", "count how often items occur"];

/** What each model has embedded, until the page is left. */
const indexes = new Map();

/**
 * @param {{models: {id: string}[], chatModels: {id: string}[], onKey: () => void}} props
 */
export function Search({ models, chatModels, onKey }) {
  const [query, setQuery] = useState("");
  const [chosen, setChosen] = useState("");
  const [progress, setProgress] = useState(/** @type {string} */ (""));
  const [found, setFound] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const latest = useRef(0);
  const model = models.find(({ id }) => id === chosen) ?? models[0];
  if (!model) {
    return html`<p class="empty">No model that embeds texts, such as pydoc-search, is served here.</p>`;
  }

  const run = async (text) => {
    const turn = ++latest.current;
    setError(null);
    try {
      const index = await indexOf(model.id, setProgress);
      const begun = performance.now();
      const { vectors: [vector] } = await embed(model.id, [text]);
      if (turn !== latest.current) return;
      const hits = nearest(index.entries, index.vectors, vector, NUM_HITS);
      setFound({ text, hits, index, model: model.id, ms: performance.now() - begun, turn });
      announce(`${hits.length} entries. The best: ${hits[0].entry.name}.`);
    } catch (problem) {
      if (turn === latest.current) setError(problem);
    } finally {
      if (turn === latest.current) setProgress("");
    }
  };
  const submit = (event) => {
    event.preventDefault();
    if (query.trim()) run(query.trim());
  };
  const askFor = (text) => {
    setQuery(text);
    run(text);
  };
  return html`
    <div class="sheet">
      <form onSubmit=${submit}>
        <h2>Search Python's standard library</h2>
        <div class="row bottom">
          <label class="field wide">
            <span>What should it do?</span>
            <input type="search" value=${query} onInput=${(event) => setQuery(event.target.value)} />
          </label>
          <${ModelChoice} label="Model" models=${models} value=${model.id} onChange=${setChosen} />
          <button class="primary" disabled=${Boolean(progress) || !query.trim()}>Search</button>
        </div>
        <p class="row">
          ${EXAMPLES.map((each) => html`
            <button type="button" class="chip" disabled=${Boolean(progress)}
              onClick=${() => askFor(each)}>${each}</button>`)}
        </p>
        ${!indexes.has(model.id) && html`
          <p class="detail">The first search embeds ${NUM_ENTRIES} entries of the documentation with ${model.id},
            about 150,000 tokens. This page keeps their vectors until it is left.</p>`}
      </form>
      ${progress && html`<p class="waiting"><span class="dot"></span>${progress}</p>`}
      <${ErrorNotice} error=${error} onRetry=${() => run(query.trim())} onKey=${onKey} />
      ${found && html`<${Hits} found=${found} />`}
      ${found && chatModels.length > 0 && html`
        <${Explained} key=${found.turn} name=${found.hits[0].entry.name} models=${chatModels} onKey=${onKey} />`}
    </div>`;
}

/** Return the entries and their vectors, made now if they are not there. */
async function indexOf(model, tell) {
  if (!indexes.has(model)) {
    tell("Loading the entries");
    const entries = await loadEntries();
    const onProgress = (done) => tell(`Embedding: ${number(done)} of ${number(entries.length)} entries`);
    onProgress(0);
    indexes.set(model, { entries, ...(await embedAll(model, entries, onProgress)) });
  }
  return indexes.get(model);
}

function Hits({ found }) {
  const { hits, index, ms, text, model } = found;
  return html`
    <section aria-label=${`Entries found for "${text}"`}>
      <ol class="hits">
        ${hits.map(({ entry, score }) => html`
          <li key=${entry.text}>
            <p class="hit"><span class="tag">${entry.kind}</span> <code><strong>${entry.name}</strong>${entry.parameters}</code>
              <meter min="0" max="1" value=${Math.max(0, score)} aria-label="Similarity"></meter>
              <span class="amount">${number(score, 2)}</span></p>
            <p class="detail">${entry.summary}</p>
          </li>`)}
      </ol>
      <dl class="figures">
        <div><dt>Search</dt><dd>${number(ms)} ms</dd></div>
        <div><dt>Embedded</dt>
          <dd>${number(index.entries.length)} entries in ${number(index.seconds, 1)} s</dd></div>
        <div><dt>Speed</dt><dd>${number(index.tokens / index.seconds)} tokens/s</dd></div>
      </dl>
      <${Code} made=${{ kind: "embeddings", body: { model, input: text } }} />
    </section>`;
}

/** A generating model's answer about an entry. */
function Explained({ name, models, onKey }) {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const turn = useRef(/** @type {import("./answer.js").Turn | null} */ (null));
  const running = useRef(/** @type {AbortController | null} */ (null));
  const model = models.find(({ id }) => id === "pydoc-chat") ?? models[0];
  const question = `What does ${name} do?`;
  const run = () => {
    turn.current = newTurn("assistant");
    turn.current.body = { model: model.id, messages: [{ role: "user", content: question }], max_tokens: 256 };
    running.current = new AbortController();
    runAnswer(turn.current, { signal: running.current.signal, onChange: redraw, onNotice: announce });
    redraw();
  };
  useEffect(() => () => running.current?.abort(), []);
  if (!turn.current) {
    return html`<p class="row"><button type="button" onClick=${run}>Ask ${model.id}: ${question}</button></p>`;
  }
  return html`
    <section aria-label=${`Answer of ${model.id}`}>
      <h3>${model.id} on <code>${name}</code></h3>
      <${Answer} turn=${turn.current} onRetry=${run} onKey=${onKey} onChange=${redraw} />
      ${turn.current.state === "running" && html`
        <p class="row"><button type="button" onClick=${() => running.current.abort()}>Stop</button></p>`}
    </section>`;
}
