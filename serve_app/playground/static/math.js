// Formulas in a text, as TeX writes them: where they begin and end, and how KaTeX draws them.

import { load, soon } from "./later.js";

const MAX_TEX = 2_000;
const MAX_DRAWN = 500;
/** Marks of a formula within a line, the longest first. */
const INLINE = [["$$", "$$", true], ["$", "$", false], ["\\[", "\\]", true], ["\\(", "\\)", false]];
const BLOCKS = { $$: "$$", "\\[": "\\]" };

/**
 * Have a parser of Markdown know formulas. They become `<code class="math">`, or `class="math display"`.
 * @param {any} parser markdown-it's.
 */
export function knowFormulas(parser) {
  const { escapeHtml } = parser.utils;
  parser.inline.ruler.before("escape", "formula", inlineRule);
  parser.block.ruler.before("fence", "formula", blockRule, { alt: ["paragraph", "reference", "blockquote", "list"] });
  parser.renderer.rules.formula = (tokens, index) =>
    `<code class="math${tokens[index].meta.isDisplay ? " display" : ""}">${escapeHtml(tokens[index].content)}</code>`;
  parser.renderer.rules.formula_block = (tokens, index) =>
    `<p><code class="math display">${escapeHtml(tokens[index].content)}</code></p>`;
}

function inlineRule(state, isSilent) {
  const { src, pos } = state;
  const marks = INLINE.find(([open]) => src.startsWith(open, pos));
  if (!marks) return false;
  const [open, close, isDisplay] = marks;
  const start = pos + open.length;
  const end = open === "$" ? endOfDollar(src, start) : endOf(src, close, start);
  if (end < 0) return false;
  if (!isSilent) {
    const token = state.push("formula", "code", 0);
    Object.assign(token, { content: src.slice(start, end).trim(), meta: { isDisplay } });
  }
  state.pos = end + close.length;
  return true;
}

function endOf(src, close, start) {
  const end = src.slice(start, start + MAX_TEX).indexOf(close);
  return end > 0 && src.slice(start, start + end).trim() ? start + end : -1;
}

/** Prices are no formulas: no space stands inside the dollars, no digit behind the second. */
function endOfDollar(src, start) {
  if (/[\s$]/.test(src[start] ?? " ")) return -1;
  const limit = Math.min(src.length, start + MAX_TEX);
  for (let end = src.indexOf("$", start); end > 0 && end < limit; end = src.indexOf("$", end + 1)) {
    if (src[end - 1] === "\\") continue;
    return /\s/.test(src[end - 1]) || /\d/.test(src[end + 1] ?? "") ? -1 : end;
  }
  return -1;
}

function blockRule(state, startLine, endLine, isSilent) {
  const from = state.bMarks[startLine] + state.tShift[startLine];
  const open = state.src.slice(from, from + 2);
  const close = Object.hasOwn(BLOCKS, open) ? BLOCKS[open] : "";
  if (!close || state.sCount[startLine] - state.blkIndent >= 4) return false;
  const lines = [state.src.slice(from + 2, state.eMarks[startLine])];
  let size = 0;
  for (let line = startLine; ; lines.push(state.getLines(line, line + 1, state.blkIndent, false))) {
    const text = lines.at(-1).trimEnd();
    size += text.length;
    line = startLine + lines.length;
    if (text.endsWith(close) && (lines.length > 1 || text.trim() !== "")) {
      lines[lines.length - 1] = text.slice(0, -close.length);
      break;
    }
    // What stands behind a formula in its line makes it part of a paragraph.
    if (text.includes(close) || line >= endLine || size > MAX_TEX || state.sCount[line] < state.blkIndent) return false;
  }
  const content = lines.join("\n").trim();
  if (!content) return false;
  if (isSilent) return true;
  state.line = startLine + lines.length;
  const token = state.push("formula_block", "code", 0);
  Object.assign(token, { block: true, content, map: [startLine, state.line] });
  return true;
}

/** What was drawn, by its source; a growing answer draws its paragraphs again and again. */
const drawn = new Map();

/**
 * Draw the formulas of a text; until they are drawn, and if they can't be, their sources stand there.
 * @param {Element} element
 */
export function drawFormulas(element) {
  const sources = element.matches("code.math") ? [element] : [...element.querySelectorAll("code.math")];
  for (const source of sources) {
    const known = drawn.get(keyOf(source));
    if (known) source.replaceWith(known.cloneNode(true));
    else if (known !== null) {
      load("katex.css", "katex.js").then(() => soon(() => draw(source)), () => {});
    }
  }
}

/** @param {Element} source */
const keyOf = (source) => `${source.className} ${source.textContent}`;

/** @param {Element} source */
function draw(source) {
  if (!source.isConnected) return;
  const made = drawn.has(keyOf(source)) ? drawn.get(keyOf(source)) : rendered(source);
  drawn.set(keyOf(source), made);
  if (drawn.size > MAX_DRAWN) drawn.delete(drawn.keys().next().value);
  if (!made) return;
  const shown = made.cloneNode(true);
  source.replaceWith(shown);
  loadFonts(shown);
}

/**
 * @param {Element} source
 * @returns {Element | null} null if it is no TeX.
 */
function rendered(source) {
  const element = document.createElement("span");
  try {
    // KaTeX makes elements, and sets their sizes, one by one: no HTML is parsed, and the page's policy, which forbids
    // the attribute `style`, is met. Untrusted TeX has no links, no pictures, and no classes of its own.
    globalThis.katex.render(source.textContent, element, {
      displayMode: source.classList.contains("display"), trust: false, strict: "ignore", throwOnError: true,
      maxSize: 20, maxExpand: 500,
    });
  } catch {
    return null;
  }
  element.className = "formula";
  return element;
}

/** @param {Element} shown */
function loadFonts(shown) {
  for (const leaf of shown.querySelectorAll(".katex-html *")) {
    if (leaf.childElementCount || !leaf.textContent) continue;
    const { fontFamily, fontWeight, fontStyle } = getComputedStyle(leaf);
    const [family] = fontFamily.split(",");
    if (!family.startsWith("KaTeX_")) continue;
    const style = `${Number(fontWeight) >= 600 ? "Bold" : ""}${fontStyle === "italic" ? "Italic" : ""}` || "Regular";
    load(`${family}-${style}.woff2`).catch(() => {});
  }
}
