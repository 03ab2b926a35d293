// The keyboard's shortcuts. A button tells its own by `aria-keyshortcuts`; a shortcut presses the last such button.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { browserStorage } from "./storage.js";
import { Icon } from "./icons.js";

const OFF = "raystream-shortcuts-off";

/** What the dialog lists. */
const ALWAYS = [
  ["Enter", "send the message; while editing: ask again"],
  ["Shift+Enter", "begin a new line"],
  ["↑", "in an empty message: edit the last question"],
  ["Escape", "leave an edit or a text box; stop the answer"],
];
const SINGLE = [
  ["/", "write a message"],
  ["e", "edit the last question"],
  ["r", "answer again"],
  ["c", "copy the last answer"],
  ["n", "new chat"],
  ["1 2 3 …", "show a tab"],
  ["?", "this list"],
];
const PRESSED = new Set(["e", "r", "c", "n", "/", "?"]);

/**
 * Return what a key means.
 * @param {{key: string, ctrlKey?: boolean, metaKey?: boolean, altKey?: boolean, isComposing?: boolean}} event
 * @param {{isTyping: boolean, isMessage?: boolean, isOff: boolean, numTabs: number}} now Whether a text box has the
 *   focus, whether it is the message's, and whether keys of one letter are turned off.
 * @returns {{press: string} | {tab: number} | {leave: true} | null}
 */
export function meaningOf(event, { isTyping, isMessage = false, isOff, numTabs }) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return null;
  if (event.key === "Escape") return isTyping && !isMessage ? { leave: true } : { press: "Escape" };
  if (isTyping || isOff) return null;
  if (PRESSED.has(event.key)) return { press: event.key };
  const tab = /^[1-9]$/.test(event.key) ? Number(event.key) - 1 : numTabs;
  return tab < numTabs ? { tab } : null;
}

const isTyping = ({ tagName, type }) =>
  tagName === "TEXTAREA" || tagName === "SELECT" || (tagName === "INPUT" && !/^(checkbox|radio|button|file)$/.test(type));

const isMessage = (element) => element.getAttribute("aria-keyshortcuts") === "/";

/** Press the last element in view that has this shortcut. @param {string} key @returns {boolean} Whether there is one. */
export function press(key) {
  const found = [...document.querySelectorAll(`[aria-keyshortcuts~="${CSS.escape(key)}"]`)];
  const target = found.findLast((each) => !each.disabled && each.checkVisibility());
  if (!target) return false;
  if (target.tagName === "TEXTAREA") target.focus();
  else target.click();
  return true;
}

/** @param {(index: number) => void} onTab @param {number} numTabs */
export function useShortcuts(onTab, numTabs) {
  const act = useRef(onTab);
  act.current = onTab;
  useEffect(() => {
    const note = (event) => {
      if (event.defaultPrevented || document.querySelector("dialog[open]")) return;
      const meaning = meaningOf(event, {
        isTyping: isTyping(event.target), isMessage: isMessage(event.target), isOff: Boolean(browserStorage.read(OFF)), numTabs,
      });
      if (!meaning) return;
      if ("leave" in meaning) return event.target.blur();
      if ("press" in meaning ? press(meaning.press) : (act.current(meaning.tab), true)) event.preventDefault();
      else if (event.key === "Escape") event.target.blur();
    };
    addEventListener("keydown", note);
    return () => removeEventListener("keydown", note);
  }, [numTabs]);
}

/** A button that lists the shortcuts. */
export function ShortcutsButton() {
  const dialog = useRef(null);
  const [isOff, setOff] = useState(Boolean(browserStorage.read(OFF)));
  const change = (event) => {
    setOff(!event.target.checked);
    browserStorage.write(OFF, event.target.checked ? "" : "off");
  };
  return html`
    <button type="button" class="quiet" aria-keyshortcuts="?" onClick=${() => dialog.current.showModal()}>
      <${Icon} name="keys" /><span class="name">Shortcuts</span></button>
    <dialog ref=${dialog} aria-labelledby="shortcuts-title">
      <h2 id="shortcuts-title">Shortcuts</h2>
      <${Keys} keys=${ALWAYS} />
      <label class="check">
        <input type="checkbox" checked=${!isOff} onChange=${change} />
        <span>Keys of one letter, outside of text boxes</span>
      </label>
      <${Keys} keys=${SINGLE} />
      <p class="row"><button type="button" class="primary" onClick=${() => dialog.current.close()}>Close</button></p>
    </dialog>`;
}

const Keys = ({ keys }) => html`
  <dl class="keys">
    ${keys.map(([key, what]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}
  </dl>`;
