// What the page's modules find in a browser, as far as those without elements need it. Imported before them.

import { readFileSync } from "node:fs";
import { runInThisContext } from "node:vm";

const STATIC = new URL("../../../../serve_app/playground/static/", import.meta.url);

const storage = () => {
  const kept = new Map();
  return {
    getItem: (name) => kept.get(name) ?? null,
    setItem: (name, text) => void kept.set(name, text),
    removeItem: (name) => void kept.delete(name),
  };
};

globalThis.document = { baseURI: process.env.PAGE ?? "http://127.0.0.1:8000/" };
globalThis.window = globalThis;
globalThis.matchMedia = () => ({ matches: true, addEventListener: () => {}, removeEventListener: () => {} });
for (const name of ["localStorage", "sessionStorage"]) {
  Object.defineProperty(globalThis, name, { value: storage(), configurable: true });
}
// The purifier needs a browser's parser; what passes through here is markdown-it's own HTML.
globalThis.DOMPurify = () => ({ addHook: () => {}, sanitize: (html) => html });

/** Run a script that the page loads by a tag. */
export const load = (file) => runInThisContext(readFileSync(new URL(file, STATIC), "utf8"));

/** @returns {Promise<any>} A module of the page. */
export const moduleOf = (name) => import(new URL(`${name}.js`, STATIC));
