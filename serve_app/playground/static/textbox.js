// A text box that grows with its text, and the focus of those who type.

import { html } from "./vendor/preact.js";

/** More text than any window shows needs no measuring. */
const MOST_MEASURED = 8_000;

/** @param {string} text The beginning of it, which the style sheet lays out to learn the height. */
const measured = (text) => `${text.slice(0, MOST_MEASURED)}\n`;

/**
 * A text box as tall as its text, up to the height that its style allows.
 * @param {{text: string, box?: {current: any}, [attribute: string]: any}} props Other properties are the textarea's.
 */
export const TextBox = ({ text, box, ...others }) => html`
  <span class="grows" data-text=${measured(text)}>
    <textarea rows="1" ref=${box} value=${text} ...${others}></textarea>
  </span>`;

/** @param {KeyboardEvent} event @returns {boolean} Whether it sends the text: Enter does, and Shift+Enter begins a line. */
export const isSent = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

const FINE = matchMedia("(pointer: fine)");

/**
 * Move the focus to a text box, at the end of its text; on a touch screen to what surrounds it, since the keyboard
 * would cover the page. Only what surrounds it is scrolled into view: the box at the page's foot always is.
 * @param {HTMLTextAreaElement | null} box @param {HTMLElement | null} around
 */
export function focusBox(box, around = null) {
  const target = FINE.matches ? box : around;
  target?.focus({ preventScroll: target !== around });
  if (target === box) box?.setSelectionRange(box.value.length, box.value.length);
}
