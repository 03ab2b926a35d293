// The settings of a conversation: the model, the system prompt, sampling, a schema, tools.

import { html } from "./vendor/preact.js";
import { examplesFor } from "./demo.js";
import { ModelFacts, placeholdersOf } from "./models.js";
import { ModelChoice } from "./parts.js";

/** A field of the form whose text can't become a part of a request. */
export class OptionError extends Error {}

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "Top k", min: -1, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.05 },
  { name: "seed", label: "Seed", step: 1 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.1, max: 2, step: 0.05 },
];

const PRIORITY = { name: "priority", label: "Priority", step: 1 };

const TEXTS = { system: "a system prompt", stop: "stop texts", schema: "a JSON schema", tools: "tools" };

const TOOL_CHOICES = { auto: "if it wants to", required: "it must", none: "it must not" };

/** @typedef {Record<string, string>} Options The form's fields, by name. */

/** @type {Options} */
export const DEFAULTS = { model: "", system: "", stop: "", schema: "", tools: "", tool_choice: "auto" };

/**
 * Return the fields of a request that the form asks for, without the messages.
 * @param {Options} options
 * @throws {OptionError} A field can't be read.
 */
export function fieldsOf(options) {
  const stops = options.stop.split("\n").filter(Boolean);
  const fields = { model: options.model };
  for (const { name, label } of [...NUMBERS, PRIORITY]) {
    const text = (options[name] ?? "").trim();
    if (text === "") continue;
    if (Number.isNaN(Number(text))) throw new OptionError(`${label} is no number.`);
    fields[name] = Number(text);
  }
  if (stops.length) fields.stop = stops;
  const schema = parsed(options.schema, "The JSON schema");
  if (schema) {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  const tools = parsed(options.tools, "The list of tools");
  if (tools) Object.assign(fields, { tools, tool_choice: options.tool_choice });
  return fields;
}

/** @param {string} text @param {string} what */
function parsed(text, what) {
  if (!text.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new OptionError(`${what} is no JSON: ${error.message}.`);
  }
}

/**
 * Return what the form asks for beside the model, in a line; "" if all is the model's default.
 * @param {Options} options
 */
export const differences = (options) =>
  [
    ...[...NUMBERS, PRIORITY].filter(({ name }) => options[name]?.trim()).map(({ name, label }) => `${label.toLowerCase()} ${options[name]}`),
    ...Object.entries(TEXTS).filter(([name]) => options[name]?.trim()).map(([, what]) => what),
  ].join(", ");

/**
 * @param {{options: Options, models: import("./models.js").Model[], onChange: (changed: Options) => void,
 *   onModels: () => void, isChat?: boolean}} props `onModels` is called when a model's state has changed. A model that
 *   does not chat reads no system prompt and calls no tools.
 */
export function OptionsForm({ options, models, onChange, onModels, isChat = true }) {
  const set = (name) => (event) => onChange({ ...options, [name]: event.target.value });
  const model = models.find(({ id }) => id === options.model);
  const placeholders = placeholdersOf(model);
  return html`
    <${ModelChoice} label="Model" models=${models} value=${options.model}
      onChange=${(id) => onChange({ ...options, model: id })} />
    ${model && html`<${ModelFacts} model=${model} onChange=${onModels} />`}
    ${isChat && html`
      <label class="field">
        <span>System prompt</span>
        <textarea rows="2" value=${options.system} onInput=${set("system")}></textarea>
      </label>`}
    <fieldset>
      <legend>Sampling <small>(empty: the model's default)</small></legend>
      <div class="numbers">
        ${NUMBERS.map(({ name, label, ...bounds }) => html`
          <label class="field">
            <span>${label}</span>
            <input type="number" inputmode="decimal" ...${bounds} placeholder=${placeholders[name]}
              value=${options[name] ?? ""} onInput=${set(name)} />
          </label>`)}
      </div>
      <label class="field">
        <span>Stop at <small>(one text a line)</small></span>
        <textarea rows="1" value=${options.stop} onInput=${set("stop")}></textarea>
      </label>
    </fieldset>
    <label class="field">
      <span>Priority <small>(lower runs first; empty: the key's)</small></span>
      <input type="number" inputmode="numeric" step=${PRIORITY.step} value=${options.priority ?? ""}
        onInput=${set("priority")} />
    </label>
    ${isChat && html`<${ChatOptions} options=${options} onChange=${onChange} set=${set} />`}`;
}

const ChatOptions = ({ options, onChange, set }) => html`
    <${JsonField} label="JSON schema of the answer" name="schema" example=${examplesFor(options.model).schema}
      options=${options} onChange=${onChange} />
    <${JsonField} label="Tools" name="tools" example=${examplesFor(options.model).tools}
      options=${options} onChange=${onChange}>
      <label class="field">
        <span>May the model call them?</span>
        <select value=${options.tool_choice} onChange=${set("tool_choice")}>
          ${Object.entries(TOOL_CHOICES).map(([value, text]) => html`
            <option value=${value} selected=${value === options.tool_choice}>${value}: ${text}</option>`)}
        </select>
      </label>
    <//>`;

function JsonField({ label, name, example, options, onChange, children }) {
  const text = options[name];
  const set = (value) => onChange({ ...options, [name]: value });
  return html`
    <details class="extra" open=${Boolean(text)}>
      <summary>${label}${text.trim() ? html` <small class="on">on</small>` : ""}</summary>
      <label class="field">
        <span class="unseen">${label}, as JSON</span>
        <textarea class="mono" rows="7" spellcheck="false" value=${text}
          onInput=${(event) => set(event.target.value)}></textarea>
      </label>
      <p class="row">
        <button type="button" class="quiet" onClick=${() => set(JSON.stringify(example, null, 2))}>
          Insert an example</button>
        ${text && html`<button type="button" class="quiet" onClick=${() => set("")}>Clear</button>`}
      </p>
      ${children}
    </details>`;
}
