// The switch between the versions of a turn: a question and its edits, an answer and its repeats.

import { html } from "./vendor/preact.js";

/**
 * @param {{all: import("./answer.js").Turn[], shown: import("./answer.js").Turn,
 *   onShow: (turn: import("./answer.js").Turn) => void}} props
 */
export function Versions({ all, shown, onShow }) {
  if (all.length < 2) return null;
  const at = all.indexOf(shown);
  const step = (label, sign, other) => html`
    <button type="button" class="quiet" aria-label=${label} title=${label} aria-disabled=${!other}
      onClick=${() => other && onShow(other)}>${sign}</button>`;
  return html`
    <span class="versions" role="group" aria-label="Versions">
      ${step("Previous version", "‹", all[at - 1])}
      <span>${at + 1} of ${all.length}</span>
      ${step("Next version", "›", all[at + 1])}
    </span>`;
}
