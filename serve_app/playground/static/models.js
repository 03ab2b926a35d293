// The models that the server is configured with: their states, asked for again and again, and their facts.

import { html, useCallback, useEffect, useState } from "./vendor/preact.js";
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
 * Return the smallest request that starts a replica of a model.
 * @param {{id: string, task: string}} model
 */
export const wakingRequest = ({ id: model, task }) => ({
  generate: { path: "tokenize", body: { model, prompt: "a" } },
  classify: { path: "v1/classify", body: { model, input: "a" } },
  embed: { path: "v1/embeddings", body: { model, input: "a" } },
})[task];

/**
 * A button that wakes a model that sleeps.
 * @param {{model: {id: string, task: string, state: string}, onChange?: () => void}} props
 */
export function Wake({ model, onChange }) {
  const [sinceMs, setSince] = useState(0);
  const [nowMs, setNow] = useState(0);
  const [error, setError] = useState(/** @type {any} */ (null));
  useEffect(() => {
    if (!sinceMs) return undefined;
    const timer = setInterval(() => setNow(performance.now()), 1000);
    return () => clearInterval(timer);
  }, [sinceMs]);
  const wake = async () => {
    const { path, body } = wakingRequest(model);
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
