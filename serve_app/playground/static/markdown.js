// A model's text as HTML. The text is hostile: it may come from anyone who wrote what the model has read.
//
// Two guards, one behind the other: markdown-it escapes all HTML in the text, and DOMPurify then lets only
// the elements below pass. Links lead to http and https only; nothing is loaded, pictures included. The
// page's Content-Security-Policy is the third.

/** A longer text is shown as it is: to render it again and again would take too long. */
const MAX_CHARACTERS = 40_000;
const MAX_LINES = 2_000;

const TAGS = [
  "p", "br", "hr", "h3", "h4", "h5", "h6", "strong", "em", "s", "a", "code", "pre", "blockquote",
  "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "div",
];
const ATTRIBUTES = ["href", "title", "start", "align", "tabindex", "role", "aria-label", "target", "rel"];
const SCROLLS = 'tabindex="0" role="region"';
const LOWEST_HEADING = 6;

const parser = globalThis.markdownit({ html: false, linkify: true }).disable("image");
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // os.path is no host
const { rules } = parser.renderer;

rules.table_open = () => `<div ${SCROLLS} aria-label="Table"><table>`;
rules.table_close = () => "</table></div>";
rules.fence = rules.code_block = (tokens, index) =>
  `<pre ${SCROLLS} aria-label="Code"><code>${parser.utils.escapeHtml(tokens[index].content)}</code></pre>`;

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

/**
 * Return safe HTML.
 * @param {string} text Markdown by a model.
 */
export const htmlOf = (text) =>
  purifier.sanitize(parser.render(text), {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ATTRIBUTES,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    ALLOWED_URI_REGEXP: /^https?:\/\//i,
    ADD_URI_SAFE_ATTR: ATTRIBUTES.filter((name) => name !== "href"),
  });

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
