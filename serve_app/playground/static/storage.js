// What the browser keeps for the page. A browser that forbids it keeps nothing, and the page works without.

/** @typedef {"sessionStorage" | "localStorage"} Kind */

/** @param {Kind} kind @param {string} key @returns {string} "" if nothing is kept. */
export function stored(kind, key) {
  try {
    return window[kind].getItem(key) ?? "";
  } catch {
    return "";
  }
}

/** @param {Kind} kind @param {string} key @param {string} value "" forgets it; so does one that is too large. */
export function store(kind, key, value) {
  try {
    window[kind].removeItem(key);
    if (value) window[kind].setItem(key, value);
  } catch {
    // It is not kept.
  }
}
