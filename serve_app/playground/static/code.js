// Blocks of code in a text: their language, a button to copy, and colours.

import { load, soon } from "./later.js";
import { copyText } from "./parts.js";

/** Longer code has no colours; a block that still grows has them as long as they cost next to nothing. */
const MAX_COLOURED = 30_000;
const MAX_GROWING = 3_000;
const COPIED_MS = 2_000;
const NAMES = {
  py: "Python", sh: "Shell", js: "JavaScript", javascript: "JavaScript", ts: "TypeScript", typescript: "TypeScript",
  cpp: "C++", cs: "C#", csharp: "C#", php: "PHP",
};
const ABBREVIATED = /^(css|html|ini|json|sql|toml|xml|yaml|yml)$/;

/** @param {string} language As the text names it. @returns {string} */
const nameOf = (language) =>
  NAMES[language] ?? (ABBREVIATED.test(language) ? language.toUpperCase() : language.replace(/^[a-z]/, (letter) => letter.toUpperCase()));

/** @param {Element} code @returns {string} As the text names it; "" if it does not. */
export const languageOf = (code) => /^language-(.+)$/.exec(code.className)?.[1] ?? "";

/**
 * Put a block of code into a frame that names its language, with a button to copy it.
 * @param {Element} pre
 */
export function frame(pre) {
  const code = pre.firstElementChild;
  const language = languageOf(code);
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const name = document.createElement("span");
  const button = document.createElement("button");
  figure.className = "code-block";
  name.textContent = nameOf(language);
  button.type = "button";
  button.className = "quiet";
  button.textContent = "Copy";
  button.setAttribute("aria-label", language ? `Copy the ${name.textContent} code` : "Copy the code");
  button.onclick = async () => {
    button.textContent = await copyText(code.textContent);
    setTimeout(() => { button.textContent = "Copy"; }, COPIED_MS);
  };
  if (language) pre.setAttribute("aria-label", `Code, ${name.textContent}`);
  caption.append(name, button);
  pre.replaceWith(figure);
  figure.append(caption, pre);
  return figure;
}

/**
 * Colour code by its language.
 * @param {Element} code
 * @param {(html: string) => string} purified
 * @param {boolean} isGrowing Whether more of it is to come.
 */
export function colour(code, purified, isGrowing) {
  const text = code.textContent;
  const language = languageOf(code);
  if (!language || !text || text.length > (isGrowing ? MAX_GROWING : MAX_COLOURED)) return;
  const paint = () => {
    // Meanwhile it may have grown; then it is coloured anew.
    if (code.textContent !== text || !globalThis.hljs.getLanguage(language)) return;
    code.innerHTML = purified(globalThis.hljs.highlight(text, { language, ignoreIllegals: true }).value);
  };
  if (isGrowing && globalThis.hljs) paint();
  else load("highlight.js").then(() => soon(paint), () => {});
}
