// Parts that several tabs share: errors, announcements, the choice of a model, and code to copy.

import { html, useEffect, useState } from "./vendor/preact.js";
import { Icon } from "./icons.js";
import { abridged, curl, javascript, python } from "./snippets.js";

/**
 * Tell a screen reader something, once. What changes with each token is never told this way.
 * @param {string} text
 */
export function announce(text) {
  const status = document.getElementById("status");
  if (status) status.textContent = text;
}

/**
 * An error in words, with what can be done about it.
 * @param {{error: import("./api.js").ApiError | null, onRetry?: () => void, label?: string,
 *   onKey?: () => void}} props
 */
export function ErrorNotice({ error, onRetry, label = "Try again", onKey }) {
  const wait = useCountdown(error);
  if (!error) return null;
  const isKeyAsked = error.status === 401;
  return html`
    <div class="notice" role="alert">
      <p><strong>${error.message}</strong></p>
      ${error.detail && html`<p class="detail">${error.detail}</p>`}
      <p class="row">
        ${isKeyAsked && onKey && html`<button type="button" class="primary" onClick=${onKey}>Enter a key</button>`}
        ${!isKeyAsked && onRetry && html`
          <button type="button" class="primary" onClick=${onRetry}>
            ${label}${wait > 0 ? ` (${wait} s)` : ""}
          </button>`}
      </p>
    </div>`;
}

/** @returns {number} Seconds until a retry may succeed. */
function useCountdown(error) {
  const [wait, setWait] = useState(0);
  useEffect(() => {
    setWait(error?.retryAfterS ?? 0);
    if (!error?.retryAfterS) return undefined;
    const timer = setInterval(() => setWait((seconds) => Math.max(0, seconds - 1)), 1000);
    return () => clearInterval(timer);
  }, [error]);
  return wait;
}

const NOT_READY = { asleep: " (asleep)", scaling: " (waking)", down: " (loading)", failed: " (failed)" };

/**
 * @param {{label: string, models: {id: string, state?: string}[], value: string, onChange: (id: string) => void}} props
 */
export const ModelChoice = ({ label, models, value, onChange }) => html`
  <label class="field">
    <span>${label}</span>
    <select value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${models.map(({ id, state = "" }) => html`
        <option value=${id} selected=${id === value}>${id}${NOT_READY[state] ?? ""}</option>`)}
    </select>
  </label>`;

const LANGUAGES = { curl, Python: python, JavaScript: javascript };

/**
 * The request that was just made, as code.
 * @param {{made: import("./snippets.js").Made}} props
 */
export function Code({ made }) {
  const [isOpen, setOpen] = useState(false);
  return html`
    <details class="code" onToggle=${(event) => setOpen(event.currentTarget.open)}>
      <summary>Copy as code</summary>
      ${isOpen && html`<${OpenCode} made=${made} />`}
    </details>`;
}

function OpenCode({ made }) {
  const [language, setLanguage] = useState("curl");
  const code = LANGUAGES[language](made);
  return html`
    <div class="row" role="group" aria-label="Language">
      ${Object.keys(LANGUAGES).map((each) => html`
        <button type="button" class="chip" aria-pressed=${each === language}
          onClick=${() => setLanguage(each)}>${each}</button>`)}
      <${CopyButton} text=${code} label=${`Copy ${language}`} />
    </div>
    <pre tabindex="0" role="region" aria-label=${`${language} code`}><code>${abridged(code)}</code></pre>`;
}

/** @param {string} text @returns {Promise<string>} What to tell the user, as a screen reader has. */
export async function copyText(text) {
  let words = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Only pages by https or on this machine may use the clipboard.
    words = "Not allowed here: select the text";
  }
  announce(words);
  return words;
}

/** @param {{text: string, label: string, keys?: string}} props The keys of its shortcut. */
export function CopyButton({ text, label, keys }) {
  const [done, setDone] = useState("");
  const copy = async () => {
    setDone(await copyText(text));
    setTimeout(() => setDone(""), 2000);
  };
  return html`
    <button type="button" class="quiet" aria-keyshortcuts=${keys} onClick=${copy}>
      <${Icon} name="copy" />${done || label}</button>`;
}

/** @param {number} value @param {number} digits */
export const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** @param {number} ms */
export const duration = (ms) => (ms < 995 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(2)} s`);

/** @param {number | null} bytes */
export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const gib = bytes / 2 ** 30;
  return gib >= 1 ? `${gib.toFixed(1)} GiB` : `${(bytes / 2 ** 20).toFixed(0)} MiB`;
}
