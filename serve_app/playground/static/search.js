// The tab "Search": the standard library by meaning, and an answer about the best entry.

import { html, useEffect, useReducer, useRef, useState } from "./vendor/preact.js";
import { newTurn, runAnswer } from "./answer.js";
import { embed, embedAll, loadEntries, nearest } from "./library.js";
import { NO_TEXTS, OwnTexts, Switch, textsOf } from "./own_texts.js";
import { Code, ErrorNotice, ModelChoice, announce, number } from "./parts.js";
import { download } from "./saving.js";
import { csvOf } from "./table.js";
import { Answer } from "./turn.js";

const NUM_HITS = 8;
const MAX_SHOWN = 100;
const CORPORA = { library: "Python's standard library", own: "Your own texts" };
const NUM_ENTRIES = "6,450";
const EXAMPLES = ["join the parts of a path", "remove whitespace at both ends", "count how often items occur"];

/** What each model has embedded, until the page is left: the library, and its user's own texts. */
const indexes = new Map();

/**
 * @param {{models: {id: string}[], chatModels: {id: string}[], onKey: () => void}} props
 */
export function Search({ models, chatModels, onKey }) {
  const [query, setQuery] = useState("");
  const [corpus, setCorpus] = useState("library");
  const [own, setOwn] = useState(NO_TEXTS);
  const [chosen, setChosen] = useState("");
  const [progress, setProgress] = useState(/** @type {string} */ (""));
  const [found, setFound] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const latest = useRef(0);
  const model = models.find(({ id }) => id === chosen) ?? models[0];
  if (!model) {
    return html`<p class="empty">No model that embeds texts, such as pydoc-search, is served here.</p>`;
  }

  const isOwn = corpus === "own";
  const { texts, rows, names } = textsOf(own);
  const isReady = query.trim() && (!isOwn || texts.length > 0);
  const run = async (text) => {
    const turn = ++latest.current;
    setError(null);
    try {
      const index = await indexOf(model.id, setProgress, isOwn ? { texts, rows, names } : null);
      const begun = performance.now();
      const { vectors: [vector] } = await embed(model.id, [text]);
      if (turn !== latest.current) return;
      const hits = nearest(index.entries, index.vectors, vector, isOwn ? index.entries.length : NUM_HITS);
      setFound({ text, hits, index, model: model.id, ms: performance.now() - begun, turn, isOwn });
      announce(`${hits.length} entries. The best: ${hits[0].entry.name}.`);
    } catch (problem) {
      if (turn === latest.current) setError(problem);
    } finally {
      if (turn === latest.current) setProgress("");
    }
  };
  const submit = (event) => {
    event.preventDefault();
    if (isReady) run(query.trim());
  };
  const askFor = (text) => {
    setQuery(text);
    run(text);
  };
  return html`
    <div class="sheet">
      <form onSubmit=${submit}>
        <h2>Search by meaning</h2>
        <${Switch} label="What to search" choices=${CORPORA} value=${corpus} onChange=${setCorpus} />
        ${isOwn && html`<${OwnTexts} own=${own} onChange=${setOwn} />`}
        <div class="row bottom">
          <label class="field wide">
            <span>${isOwn ? "What are you looking for?" : "What should it do?"}</span>
            <input type="search" value=${query} onInput=${(event) => setQuery(event.target.value)} />
          </label>
          <${ModelChoice} label="Model" models=${models} value=${model.id} onChange=${setChosen} />
          <button class="primary" disabled=${Boolean(progress) || !isReady}>Search</button>
        </div>
        ${!isOwn && html`
          <p class="row">
            ${EXAMPLES.map((each) => html`
              <button type="button" class="chip" disabled=${Boolean(progress)}
                onClick=${() => askFor(each)}>${each}</button>`)}
          </p>`}
        ${!isOwn && !indexes.has(model.id) && html`
          <p class="detail">The first search embeds ${NUM_ENTRIES} entries of the documentation with ${model.id},
            about 150,000 tokens. This page keeps their vectors until it is left.</p>`}
      </form>
      ${progress && html`<p class="waiting"><span class="dot"></span>${progress}</p>`}
      <${ErrorNotice} error=${error} onRetry=${() => run(query.trim())} onKey=${onKey} />
      ${found && html`<${found.isOwn ? OwnHits : Hits} key=${found.turn} found=${found} />`}
      ${found && !found.isOwn && chatModels.length > 0 && html`
        <${Explained} key=${found.turn} name=${found.hits[0].entry.name} models=${chatModels} onKey=${onKey} />`}
    </div>`;
}

/** Return the entries and their vectors, made now if they are not there. */
async function indexOf(model, tell, own) {
  const key = own ? `${model} own` : model;
  const known = indexes.get(key);
  if (known && (!own || known.texts.join("\n") === own.texts.join("\n"))) return { ...known, ...own };
  tell("Loading the entries");
  const entries = own ? own.texts.map((text, index) => ({ text, name: text, index })) : await loadEntries();
  const onProgress = (done) => tell(`Embedding: ${number(done)} of ${number(entries.length)} entries`);
  onProgress(0);
  indexes.set(key, { texts: [], ...own, entries, ...(await embedAll(model, entries, onProgress)) });
  return indexes.get(key);
}

/** The user's own texts, the nearest first. */
function OwnHits({ found }) {
  const { hits, index: { rows, names }, text, model } = found;
  const [threshold, setThreshold] = useState("0");
  const near = hits.filter(({ score }) => score >= (Number(threshold) || 0));
  const save = () => download("found.csv", csvOf([
    [...names, "similarity"],
    ...near.map(({ entry, score }) => [...names.map((_, column) => rows[entry.index][column] ?? ""), score.toFixed(6)]),
  ]), "text/csv");
  return html`
    <section aria-label=${`Texts found for "${text}"`}>
      <div class="row bottom">
        <label class="field short">
          <span>Least similarity</span>
          <input type="number" min="-1" max="1" step="0.05" value=${threshold}
            onInput=${(event) => setThreshold(event.target.value)} />
        </label>
        <button type="button" onClick=${save}>Save as CSV</button>
        <span class="detail">${number(near.length)} of ${number(hits.length)} texts</span>
      </div>
      <ol class="hits">
        ${near.slice(0, MAX_SHOWN).map(({ entry, score }) => html`
          <li key=${entry.index}>
            <p class="hit"><span dir="auto" class="own-text">${entry.text}</span>
              <meter min="0" max="1" value=${Math.max(0, score)} aria-label="Similarity"></meter>
              <span class="amount">${number(score, 2)}</span></p>
          </li>`)}
      </ol>
      ${near.length > MAX_SHOWN && html`<p class="detail">The first ${MAX_SHOWN}; the file holds all.</p>`}
      <${Code} made=${{ kind: "embeddings", body: { model, input: text } }} />
    </section>`;
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
