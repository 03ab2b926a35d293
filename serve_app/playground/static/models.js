// The models that the server is configured with: their states, asked for again and again, their facts, and the buttons
// that wake them, put them to sleep and pin them.

import { html, useCallback, useEffect, useRef, useState } from "./vendor/preact.js";
import { ask } from "./api.js";
import { Icon } from "./icons.js";
import { ErrorNotice, announce, number, size } from "./parts.js";

/**
 * @typedef {object} Model A card of `/v1/models`.
 * @property {string} id
 * @property {"generate" | "classify" | "embed"} task
 * @property {"running" | "asleep" | "scaling" | "down" | "failed"} state
 * @property {string | null} failure
 * @property {number | null} max_model_len
 * @property {boolean | null} accepts_images
 * @property {string[] | null} labels
 * @property {Record<string, number | null> | null} default_sampling
 * @property {{num_parameters: number, weight_bytes: number, dtype: string, device: string} | null} footprint
 */

const STATES = { running: "ready", asleep: "asleep", scaling: "waking", down: "loading", failed: "failed" };

/** @param {string} state @returns {string} In words. */
export const stateText = (state) => STATES[state] ?? state;

const SOON_MS = 2_000;
const LATER_MS = 15_000;

/**
 * Return when to ask again: soon while a model loads.
 * @param {Model[]} models
 */
export const pauseMs = (models) =>
  models.length && models.every(({ state }) => state !== "down" && state !== "scaling") ? LATER_MS : SOON_MS;

/**
 * The models, asked for while the page can be seen.
 * @returns {{models: Model[], error: any, load: () => Promise<void>}}
 */
export function useModels() {
  const [found, setFound] = useState({ models: /** @type {Model[]} */ ([]), error: /** @type {any} */ (null), round: 0 });
  const load = useCallback(async () => {
    try {
      const { data } = await (await ask("v1/models")).json();
      setFound(({ round }) => ({ models: data, error: null, round: round + 1 }));
    } catch (error) {
      setFound(({ models, round }) => ({ 
        models, round: round + 1, error: models.length && error.status !== 401 ? null : error,
      }));
    }
  }, []);
  useEffect(() => {
    load();
  }, []);
  useEffect(() => {
    if (!found.round || found.error?.status === 401) return undefined;
    let timer = 0;
    const wait = () => {
      clearTimeout(timer);
      if (!document.hidden) timer = setTimeout(load, pauseMs(found.models));
    };
    const shown = () => (document.hidden ? clearTimeout(timer) : load());
    wait();
    document.addEventListener("visibilitychange", shown);
    return () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", shown);
    };
  }, [found.round]);
  return { ...found, load };
}

/**
 * Return what the empty boxes of the settings stand for, by the name of the field.
 * @param {Model | undefined} model
 * @returns {Record<string, string>}
 */
export function placeholdersOf(model) {
  const { max_tokens: most, ...defaults } = model?.default_sampling ?? {};
  const length = most ?? model?.max_model_len;
  return {
    ...Object.fromEntries(Object.entries(defaults).map(([name, value]) => [name, String(value)])),
    ...(model?.default_sampling && { presence_penalty: "0", frequency_penalty: "0", seed: "random" }),
    ...(length && { max_tokens: `up to ${length}` }),
  };
}

/** @param {number} count @returns {string} Such as 3.15M. */
const compact = (count) => count.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });

/**
 * Return what is known of a model, as pairs of a name and a value.
 * @param {Model} model
 * @returns {[string, string][]}
 */
export function factsOf({ state, max_model_len: length, footprint, accepts_images: takesImages }) {
  const facts = [["State", stateText(state)]];
  if (length) facts.push(["Context", `${number(length)} tokens`]);
  if (footprint) {
    const { num_parameters: count, weight_bytes: bytes, dtype, device } = footprint;
    facts.push(["Size", `${compact(count)} parameters`], ["Weights", `${size(bytes)}, ${dtype}`], ["Device", device]);
  }
  if (takesImages !== null) facts.push(["Reads", takesImages ? "text and pictures" : "text"]);
  return facts;
}

/** @param {{model: Model, onChange: () => void}} props `onChange` is called when its state has changed. */
export const ModelFacts = ({ model, onChange }) => html`
  <dl class="facts">
    ${factsOf(model).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>
  ${model.failure && html`<p class="problem">${model.failure}</p>`}
  <${Wake} model=${model} onChange=${onChange} />`;

/**
 * Return the smallest request that wakes a model, also from a light sleep, in which it still counts tokens.
 * @param {{id: string, task: string}} model
 */
export const wakingRequest = ({ id: model, task }) => ({
  generate: { path: "v1/completions", body: { model, prompt: "a", max_tokens: 1 } },
  classify: { path: "v1/classify", body: { model, input: "a" } },
  embed: { path: "v1/embeddings", body: { model, input: "a" } },
})[task];

/**
 * A button that wakes a model that sleeps. Its request is answered once a replica runs and is awake.
 * @param {{model: {id: string, task: string, state: string}, request?: {path: string, body: object},
 *   onChange?: () => void}} props
 */
function Wake({ model, request = wakingRequest(model), onChange }) {
  const [sinceMs, setSince] = useState(0);
  const [nowMs, setNow] = useState(0);
  const [error, setError] = useState(/** @type {any} */ (null));
  useEffect(() => {
    if (!sinceMs) return undefined;
    const timer = setInterval(() => setNow(performance.now()), 1000);
    return () => clearInterval(timer);
  }, [sinceMs]);
  const wake = async () => {
    const { path, body } = request;
    setError(null);
    setNow(performance.now());
    setSince(performance.now());
    announce(`${model.id} is waking.`);
    try {
      await ask(path, { body });
      announce(`${model.id} is ready.`);
    } catch (problem) {
      setError(problem);
    } finally {
      setSince(0);
      onChange?.();
    }
  };
  if (sinceMs) {
    return html`<p class="waiting"><span class="dot"></span>Waking ${model.id}, ${Math.max(0, Math.round((nowMs - sinceMs) / 1000))} s so far</p>`;
  }
  return html`
    <${ErrorNotice} error=${error} onRetry=${wake} />
    ${model.state === "asleep" && !error && html`
      <p class="row"><button type="button" onClick=${wake}><${Icon} name="wake" />Wake ${model.id}</button></p>`}`;
}

/**
 * @typedef {{state: string, pinned: boolean, going_to_sleep: boolean}} ModelState
 * @typedef {ModelState & {id: string, task: string}} Operated A model of `/v1/devices`.
 */

/** How old `/v1/devices` may be: the server keeps it, and the states in it, for a second each. */
const MAX_AGE_MS = 2_000;

/**
 * Return a model as an operator's action has left it, until what is found is newer than that.
 * @template {Operated} ModelT
 * @param {ModelT} found
 * @param {number} foundMs When.
 * @returns {[ModelT, (state: ModelState) => void]} The function takes what an action has answered.
 */
export function useLatest(found, foundMs) {
  const [left, setLeft] = useState({ ms: -Infinity, state: /** @type {Partial<ModelState>} */ ({}) });
  const note = ({ state, pinned, going_to_sleep }) =>
    setLeft({ ms: performance.now(), state: { state, pinned, going_to_sleep } });
  return [foundMs < left.ms + MAX_AGE_MS ? { ...found, ...left.state } : found, note];
}

/**
 * Return what an operator may do to a model besides waking it, as pairs of an action and its button's name.
 * @param {ModelState & {replicas?: object[]}} model
 * @returns {[string, string][]} The button of the pin is the first, so that it keeps the focus when it changes.
 */
export function actionsOf({ state, pinned, going_to_sleep: isGoing, replicas = [] }) {
  if (pinned) return [["unpin", "Unpin"]];
  if (isGoing) return [["pin", "Pin"], ["wake", "Cancel sleep"]];
  const sleepsLightly = state === "asleep" && replicas.length > 0;
  return state === "running" || sleepsLightly ? [["pin", "Pin"], ["sleep", "Put to sleep"]] : [["pin", "Pin"]];
}

/** @param {string} id @param {string} action @returns {{path: string, body: object}} */
const actionOn = (id, action) => ({
  path: `v1/models/${id.split("/").map(encodeURIComponent).join("/")}/${action}`,
  body: {},
});

const DONE = {
  pin: "is pinned.",
  unpin: "is no longer pinned.",
  sleep: "sleeps once it has nothing to do.",
  wake: "does not go to sleep.",
};

/**
 * What an operator may do to a model.
 * @param {{model: Operated, onState: (state: ModelState) => void, onWake: () => void}} props `onState` is told what an
 *   action has left, and `onWake` is called when the model was woken, or could not be.
 */
export function Actions({ model, onState, onWake }) {
  const [error, setError] = useState(/** @type {any} */ (null));
  const isActing = useRef(false);
  const act = async (/** @type {string} */ action) => {
    if (isActing.current) return;
    isActing.current = true;
    setError(null);
    try {
      const { path, body } = actionOn(model.id, action);
      onState(await (await ask(path, { body })).json());
      announce(`${model.id} ${DONE[action]}`);
    } catch (problem) {
      setError(problem);
    } finally {
      isActing.current = false;
    }
  };
  return html`
    <${ErrorNotice} error=${error} />
    <div class="row" role="group" aria-label=${`Actions on ${model.id}`}>
      ${!model.pinned && html`
        <${Wake} model=${model} request=${actionOn(model.id, "wake?wait=true")} onChange=${onWake} />`}
      ${actionsOf(model).map(([action, name]) => html`
        <button type="button" aria-label=${`${name}: ${model.id}`} onClick=${() => act(action)}>${name}</button>`)}
    </div>`;
}
