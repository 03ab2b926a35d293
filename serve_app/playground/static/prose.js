// A model's text in the page. Of a growing text only the blocks that have changed are drawn again.

import { colour, frame, languageOf } from "./code.js";
import { blocksOfHtml, purified } from "./markdown.js";
import { drawFormulas } from "./math.js";

/**
 * @typedef {object} Block
 * @property {string} html As it came from the Markdown.
 * @property {Element[]} elements
 * @property {Element | null} code If it is a block of code.
 * @property {boolean} isGrown Whether no more is to come.
 */

/**
 * Draw a text.
 * @param {HTMLElement & {blocks?: Block[]}} element
 * @param {string} text
 * @param {boolean} isRunning Whether more of it is to come.
 */
export function drawProse(element, text, isRunning) {
  const before = element.blocks ?? [];
  const htmls = blocksOfHtml(text);
  element.blocks = htmls.map((html, index) => {
    const old = before[index];
    const block = old?.html === html ? old : drawn(element, old, html);
    const isGrowing = isRunning && index === htmls.length - 1;
    if (!block.isGrown && (block !== old || !isGrowing)) {
      for (const code of codesOf(block)) colour(code, purified, isGrowing);
    }
    block.isGrown = !isGrowing;
    return block;
  });
  for (const { elements } of before.slice(htmls.length)) for (const each of elements) each.remove();
}

/**
 * Draw a block in the place of another one, or at the end.
 * @param {HTMLElement} element
 * @param {Block | undefined} old
 * @param {string} html
 * @returns {Block}
 */
function drawn(element, old, html) {
  const made = document.createElement("template");
  made.innerHTML = purified(html);
  const elements = [...made.content.children];
  const code = elements.length === 1 && elements[0].matches("pre") ? elements[0].firstElementChild : null;
  if (code && old?.code && languageOf(code) === languageOf(old.code)) {
    // The frame stays, with the focus on its button and the place to which it is scrolled.
    old.code.textContent = code.textContent;
    return { ...old, html, isGrown: false };
  }
  const [first] = old?.elements ?? [];
  if (first) first.before(...elements);
  else element.append(...elements);
  for (const each of old?.elements ?? []) each.remove();
  const framed = elements.map((each) => (each.matches("pre") ? frame(each) : each));
  for (const each of framed) {
    for (const pre of each.matches("figure") ? [] : each.querySelectorAll("pre")) frame(pre);
    drawFormulas(each);
  }
  return { html, elements: framed, code, isGrown: false };
}

/** @param {Block} block @returns {Element[]} */
const codesOf = ({ elements }) => elements.flatMap((each) => [...each.querySelectorAll("pre > code")]);
