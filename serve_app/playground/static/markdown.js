// A model's text as HTML. The text is hostile: it may come from anyone who wrote what the model has read.
//
// Two guards, one behind the other: markdown-it escapes all HTML in the text, and DOMPurify then lets only
// the elements and classes below pass. Links lead to http and https only; nothing is loaded, pictures included.
// The page's Content-Security-Policy is the third.

import { knowFormulas } from "./math.js";

/** A longer text is shown as it is: to render it again and again would take too long. */
const MAX_CHARACTERS = 40_000;
const MAX_LINES = 2_000;

const TAGS = [
  "p", "br", "hr", "h3", "h4", "h5", "h6", "strong", "em", "s", "a", "code", "pre", "blockquote",
  "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "div", "span",
];
const ATTRIBUTES = ["href", "title", "start", "align", "tabindex", "role", "aria-label", "target", "rel", "class"];
/** What the page itself has written: a block's language, a formula, and the parts of coloured code. */
const CLASSES = /^(language-[\w+#.-]{1,30}|math( display)?|hljs-[\w -]{1,60})$/;
const SCROLLS = 'tabindex="0" role="region"';
const LOWEST_HEADING = 6;

const parser = globalThis.markdownit({ html: false, linkify: true }).disable("image");
knowFormulas(parser);
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // os.path is no host
const { rules } = parser.renderer;

rules.table_open = () => `<div ${SCROLLS} aria-label="Table"><table>`;
rules.table_close = () => "</table></div>";
rules.fence = rules.code_block = (tokens, index) => {
  const { content, info } = tokens[index];
  const [language] = info.trim().toLowerCase().split(/[\s{,:]/);
  const named = language ? ` class="language-${parser.utils.escapeHtml(language)}"` : "";
  return `<pre ${SCROLLS} aria-label="Code"><code${named}>${parser.utils.escapeHtml(content)}</code></pre>`;
};

// The page's own headings end at the second level, and its policy forbids the attribute `style`.
parser.core.ruler.push("adapt", (state) => {
  for (const token of state.tokens) {
    const heading = /^h([1-6])$/.exec(token.tag);
    if (heading) token.tag = `h${Math.min(Number(heading[1]) + 2, LOWEST_HEADING)}`;
    const align = /text-align:(\w+)/.exec(token.attrGet("style") ?? "");
    if (align) token.attrs = [["align", align[1]]];
  }
});

const purifier = globalThis.DOMPurify(window);
purifier.addHook("afterSanitizeAttributes", (node) => {
  if (!node.hasAttribute("href")) return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
});

purifier.addHook("uponSanitizeAttribute", (_, data) => {
  if (data.attrName === "class") data.keepAttr = CLASSES.test(data.attrValue);
});

/** @param {string} html @returns {string} What of it is safe. */
export const purified = (html) =>
  purifier.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ATTRIBUTES,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    ALLOWED_URI_REGEXP: /^https?:\/\//i,
    ADD_URI_SAFE_ATTR: ATTRIBUTES.filter((name) => name !== "href"),
  });

/**
 * Return the HTML of each block of a text: of a paragraph, a list, a table. It is not purified yet.
 * @param {string} text Markdown by a model.
 * @returns {string[]}
 */
export function blocksOfHtml(text) {
  const env = {};
  const blocks = [];
  let block = [];
  for (const token of parser.parse(text, env)) {
    block.push(token);
    if (token.level > 0 || token.nesting > 0) continue;
    blocks.push(parser.renderer.render(block, parser.options, env));
    block = [];
  }
  return blocks;
}

/** @param {string} text */
export const isRendered = (text) =>
  text.length <= MAX_CHARACTERS && text.split("\n", MAX_LINES + 1).length <= MAX_LINES;

const BLOCK = 8_000;

/**
 * Return a long text in blocks, so that a browser lays out only those in view.
 * @param {string} text
 */
export function blocksOf(text) {
  const blocks = [];
  for (let start = 0; start < text.length;) {
    const newline = text.lastIndexOf("\n", start + BLOCK);
    let end = newline > start ? newline + 1 : Math.min(start + BLOCK, text.length);
    if (isLowSurrogate(text.charCodeAt(end))) end += 1;
    blocks.push(text.slice(start, end));
    start = end;
  }
  return blocks;
}

/** @param {number} unit */
const isLowSurrogate = (unit) => unit >= 0xdc00 && unit <= 0xdfff;
