// The tab "Live": what the replicas do, from /v1/devices and /metrics, and the batches.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { ask } from "./api.js";
import { Chart } from "./chart.js";
import { TIMES, averageRunning, growth, growthBy, lasting, mean, samplesOf, total } from "./metrics.js";
import { Actions, stateText, useLatest } from "./models.js";
import { ErrorNotice, number, size } from "./parts.js";

const INTERVAL_MS = 2000;
const MAX_SAMPLES = 300;
/** Averages are over as many readings: a busy server looks idle between two requests. */
const WINDOW = 15;
const REFUSED = "vllm:admission_rejections_total";
const MOVED = "raystream_streams_moved_total";
const DELIVERED = "raystream_delivered_tokens_total";
const PROMPTS = "raystream_prompt_tokens_total";
/** Only a server that keeps batches has it. Any other refuses their list, and browsers log each refusal. */
const BATCHES = "raystream_batches_running";

/**
 * Ask for the figures again and again while the tab can be seen.
 * @param {boolean} isShown
 */
function useFigures(isShown) {
  const [figures, setFigures] = useState(/** @type {any} */ (null));
  const [batches, setBatches] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const [round, setRound] = useState(0);
  const history = useRef({ unixS: [], tokensPerS: [], window: [] });
  useEffect(() => {
    if (!isShown) return undefined;
    let timer = 0;
    let listing = null;
    const asking = new AbortController();
    const fail = (problem) => asking.signal.aborted || setError(problem);
    // Beside the figures, which must not wait for a slow disk.
    const list = () => (listing ??= batchesOf(asking.signal).then(setBatches, fail).finally(() => (listing = null)));
    const look = async () => {
      try {
        const found = await read(asking.signal);
        setFigures((before) => withRate(found, before, history.current));
        setError(null);
        if (found.samples[BATCHES].length) list();
        else setBatches(null);
      } catch (problem) {
        if (asking.signal.aborted) return;
        setError(problem);
        if (problem.status === 401 || problem.status === 403) return; // it would stay so
      }
      timer = setTimeout(look, INTERVAL_MS);
    };
    look();
    return () => {
      asking.abort();
      clearTimeout(timer);
    };
  }, [isShown, round]);
  return { figures, batches, error, history: history.current, retry: () => setRound(round + 1) };
}

/** @param {AbortSignal} signal */
async function read(signal) {
  const [devices, metrics] = await Promise.all([
    ask("v1/devices", { signal }).then((answer) => answer.json()),
    ask("metrics", { signal }).then((answer) => answer.text()),
  ]);
  const samples = samplesOf(metrics, [REFUSED, MOVED, DELIVERED, PROMPTS, BATCHES, ...TIMES]);
  return { models: devices.data, samples, ms: performance.now() };
}

/** @param {AbortSignal} signal @returns The batches with the component that shows them; null if none are kept. */
async function batchesOf(signal) {
  const { Batches, readBatches } = await import("./batches.js");
  const batches = await readBatches(signal);
  return batches && { Batches, batches };
}

/** Add the speed since the reading before to the history, and what there is on average. */
function withRate(found, before, history) {
  const samples = { ...found.samples };
  for (const name of [REFUSED, MOVED]) samples[name] = lasting(before?.samples[name] ?? [], samples[name]);
  const replicas = found.models.flatMap((model) => model.replicas);
  const running = replicas.reduce((sum, { work }) => sum + work.num_running, 0);
  const waiting = replicas.reduce((sum, { work }) => sum + work.num_waiting, 0);
  const parked = found.models.reduce((sum, model) => sum + model.num_parked, 0);
  const now = { ...found, samples, running, waiting, parked, tokensPerS: null };
  if (before) {
    now.tokensPerS = growth(before.samples[DELIVERED], samples[DELIVERED]) / ((found.ms - before.ms) / 1000);
    history.unixS.push(Date.now() / 1000);
    history.tokensPerS.push(now.tokensPerS);
    if (history.unixS.length > MAX_SAMPLES) for (const column of [history.unixS, history.tokensPerS]) column.shift();
  }
  history.window.push(now);
  if (history.window.length > WINDOW + 1) history.window.shift();
  return { ...now, average: averageOf(history.window) };
}

/** @param {any[]} window The latest readings; at least one. @returns Averages; null of one reading. */
function averageOf(window) {
  const [first, ...others] = window;
  if (!others.length) return null;
  const last = others.at(-1);
  const seconds = (last.ms - first.ms) / 1000;
  const generators = new Set(last.models.filter(({ task }) => task === "generate").map(({ id }) => id));
  return {
    seconds,
    running: averageRunning(first.samples, last.samples, seconds, generators),
    waiting: mean(window.map(({ waiting }) => waiting)),
    tokensPerS: growth(first.samples[DELIVERED], last.samples[DELIVERED]) / seconds,
    keys: keysOf(first, last, seconds),
    gap: Math.max(0, ...last.models.flatMap(({ replicas }) => replicas.map(({ work }) => work.waits.service_gap_tokens))),
  };
}

/** @returns What each key got a second between two readings, the most first, and how many of its requests wait. */
function keysOf(first, last, seconds) {
  const counters = [PROMPTS, DELIVERED].map((name) => growthBy("key", first.samples[name], last.samples[name]));
  const known = last.models.flatMap(({ replicas }) => replicas.flatMap(({ work }) => work.keys));
  const names = new Set([...counters.flatMap((each) => [...each.keys()]), ...known.map(({ key }) => key)]);
  const total_ = sumOf(counters.flatMap((each) => [...each.values()]));
  return [...names]
    .map((name) => {
      const own = known.filter(({ key }) => key === name);
      const tokens = sumOf(counters.map((each) => each.get(name) ?? 0));
      return {
        name,
        weight: own[0]?.weight ?? null,
        waiting: sumOf(own.map((each) => each.num_waiting)),
        tokensPerS: tokens / seconds,
        share: total_ ? tokens / total_ : null,
      };
    })
    .sort((one, other) => other.tokensPerS - one.tokensPerS || one.name.localeCompare(other.name));
}

/** @param {number[]} values */
const sumOf = (values) => values.reduce((sum, value) => sum + value, 0);

/** @returns {boolean} Whether the browser shows the page. */
function useVisible() {
  const [isVisible, setVisible] = useState(!document.hidden);
  useEffect(() => {
    const note = () => setVisible(!document.hidden);
    document.addEventListener("visibilitychange", note);
    return () => document.removeEventListener("visibilitychange", note);
  }, []);
  return isVisible;
}

/** @param {{isShown: boolean, onKey: () => void}} props */
export function Live({ isShown, onKey }) {
  const isVisible = useVisible();
  const { figures, batches, error, history, retry } = useFigures(isShown && isVisible);
  return html`
    <div class="sheet broad">
      <h2>Live</h2>
      <${ErrorNotice} error=${error} onRetry=${retry} onKey=${onKey} />
      ${error?.status === 403 && html`
        <p><button type="button" onClick=${onKey}>Enter another key</button></p>`}
      ${!figures && !error && html`<p class="waiting"><span class="dot"></span>Asking the replicas</p>`}
      ${figures && html`
        <dl class="tiles">
          <${Tile} name="Running" value=${averaged(figures.average?.running, 1)} now=${number(figures.running)} />
          <${Tile} name="Waiting" value=${averaged(figures.average?.waiting, 1)} now=${number(figures.waiting)} />
          <${Tile} name="Parked" value=${number(figures.parked)} />
          <${Tile} name="Tokens/s" value=${averaged(figures.average?.tokensPerS)}
            now=${figures.tokensPerS === null ? "–" : number(figures.tokensPerS)} />
          <${Tile} name="Refused" value=${number(total(figures.samples[REFUSED]))} />
          <${Tile} name="Moved" value=${number(total(figures.samples[MOVED]))} />
        </dl>
        <p class="detail">${figures.average
          ? `Running, waiting and tokens/s: on average over the last ${number(figures.average.seconds)} s. ` : ""}Refused
          and moved: in all.</p>
        ${history.unixS.length > 1 && html`
          <${Chart} label="Tokens delivered" x=${history.unixS}
            lines=${[{ name: "tokens/s", values: history.tokensPerS }]} format=${(value) => number(value)} />`}
        ${figures.average?.keys.some(({ name }) => name) && html`<${Keys} ...${figures.average} />`}
        ${batches && html`<${batches.Batches} batches=${batches.batches} onChange=${retry} />`}
        ${figures.models.map((model) => html`<${Model} key=${model.id} found=${model} foundMs=${figures.ms}
          samples=${figures.samples} onChange=${retry} />`)}`}
    </div>`;
}

/** @param {number | undefined} value @param {number} digits @returns {string} A small average with its digits. */
const averaged = (value, digits = 0) => (value === undefined ? "–" : number(value, value < 100 ? digits : 0));

const Tile = ({ name, value, now }) => html`
  <div><dt>${name}</dt><dd>${value}</dd>${now !== undefined && html`<dd class="now">now ${now}</dd>`}</div>`;

const WITHOUT_REPLICA = {
  asleep: "No replica: nobody uses it, and a request wakes it",
  scaling: "No replica yet: the first one starts, or the last one has stopped",
  down: "No replica yet: it loads",
  failed: "No replica, and none will start before another deploy",
};
const STATES = { healthy: "●", failing: "▲" };

/** @param {number | null} part */
const percent = (part) => (part === null ? "–" : `${number(part * 100, 1)} %`);

function Model({ found, foundMs, samples, onChange }) {
  const [model, noteState] = useLatest(found, foundMs);
  const counts = Object.entries(model.num_replicas).map(([state, count]) => `${count} ${state.toLowerCase()}`);
  const own = { model_name: model.id };
  return html`
    <section class="model" aria-label=${model.id}>
      <h3>${model.id} <span class="tag">${model.task}</span> <span
        class=${`tag is-${model.state}`}>${stateText(model.state)}</span>
        ${model.pinned && html` <span class="tag">pinned</span>`}
        ${model.going_to_sleep && html` <span class="tag">going to sleep</span>`}</h3>
      <p class="detail">
        ${counts.join(", ") || WITHOUT_REPLICA[model.state] || "No replica"}; ${number(total(samples[REFUSED], own))} refused,
        ${" "}${number(total(samples[MOVED], own))} moved${model.num_parked > 0 && `, ${number(model.num_parked)} parked now`}
        ${model.silent_replicas.length > 0 && html`; no answer from ${model.silent_replicas.join(", ")}`}
        ${model.message && html`. ${model.message}`}
      </p>
      <${Actions} model=${model} onState=${noteState} onWake=${onChange} />
      ${model.replicas.length > 0 && html`<${Replicas} model=${model} /><${Memory} model=${model} />`}
    </section>`;
}

const REASONS = { turn: "for their turn", memory: "for memory", displaced: "displaced" };

/** @returns {string} Why sequences wait, in brackets; "" if none does. */
function reasonsOf({ by_reason: counts, longest_s: longest }) {
  const told = Object.entries(counts).filter(([, count]) => count).map(([reason, count]) => `${count} ${REASONS[reason]}`);
  return told.length ? ` (${told.join(", ")}; up to ${number(longest, 1)} s)` : "";
}

/** What each key gets of all models, and how far apart those are that wait at a replica. */
const Keys = ({ keys, gap }) => html`
  <section class="model" aria-label="Keys">
    <h3>Keys</h3>
    <div class="scroll" tabindex="0" role="region" aria-label="What each key gets">
      <table>
        <thead>
          <tr>
            <th>Key</th><th class="amount">Weight</th><th class="amount">Waiting</th>
            <th class="amount">Tokens/s</th><th class="amount">Share</th>
          </tr>
        </thead>
        <tbody>
          ${keys.map(({ name, weight, waiting, tokensPerS, share }) => html`
            <tr key=${name}>
              <td><code>${name || "none"}</code></td>
              <td class="amount">${weight === null ? "–" : number(weight, 3)}</td>
              <td class="amount">${waiting}</td>
              <td class="amount">${averaged(tokensPerS, 1)}</td>
              <td class="amount">${percent(share)}</td>
            </tr>`)}
        </tbody>
      </table>
    </div>
    <p class="detail">Prompts and answers together, on average. Keys that wait: ${number(gap)} weighted tokens apart.</p>
  </section>`;

/** @returns {string} A replica's state, and whether it sleeps lightly. */
const stateOf = ({ state, light_sleep: sleep }) =>
  [state, ...(sleep && sleep.state !== "awake" ? [sleep.state.replace("_", " ")] : [])].join(", ");

const Replicas = ({ model }) => html`
  <div class="scroll" tabindex="0" role="region" aria-label=${`Replicas of ${model.id}`}>
    <table>
      <thead>
        <tr>
          <th>Replica</th><th>State</th><th>Device</th>
          <th class="amount">Running</th><th class="amount">Waiting</th>
          <th class="amount">KV in use</th><th class="amount">Memory</th><th class="amount">Moved in</th>
        </tr>
      </thead>
      <tbody>
        ${model.replicas.map((replica) => html`
          <tr key=${replica.replica_id}>
            <td><code>${replica.replica_id}</code></td>
            <td class=${`state ${replica.state}`}>${STATES[replica.state] ?? "■"} ${stateOf(replica)}</td>
            <td>${replica.device}</td>
            <td class="amount">${replica.work.num_running} of ${replica.plan.max_num_seqs}</td>
            <td class="amount">${replica.work.num_waiting}${reasonsOf(replica.work.waits)}</td>
            <td class="amount">${percent(replica.work.kv_usage)}</td>
            <td class="amount">${size(replica.memory.use.process_bytes)}</td>
            <td class="amount">${replica.work.num_moved_in ?? "–"}</td>
          </tr>`)}
      </tbody>
    </table>
  </div>`;

/** The memory of a model's replicas over the last minutes, on one axis of time. */
function Memory({ model }) {
  const columns = model.replicas
    .filter(({ memory }) => memory.history.process_bytes)
    .map(({ replica_id: name, memory: { history } }) => ({
      name,
      at: new Map(history.unix_s.map((unixS, index) => [Math.round(unixS), history.process_bytes[index]])),
    }));
  const x = [...new Set(columns.flatMap(({ at }) => [...at.keys()]))].sort((one, other) => one - other);
  if (x.length < 2) return null;
  const lines = columns.map(({ name, at }) => ({ name, values: x.map((second) => at.get(second) ?? null) }));
  return html`<${Chart} label=${`Memory of ${model.id}`} x=${x} lines=${lines} format=${size} isBytes />`;
}
