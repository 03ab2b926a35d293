// What the browser keeps for the page. A browser that blocks site data throws at each use of it, and one that is
// full refuses to write; the page then keeps the text itself, until it is left.

/** @param {"localStorage" | "sessionStorage"} kind */
function storage(kind) {
  const refused = new Map();
  return {
    /** @param {string} name @returns {string} "" if nothing is kept. */
    read(name) {
      try {
        return refused.get(name) ?? globalThis[kind].getItem(name) ?? "";
      } catch {
        return "";
      }
    },
    /**
     * @param {string} name @param {string} text "" removes what is kept.
     * @returns {boolean} Whether the browser keeps it; one that refuses still has the text before.
     */
    write(name, text) {
      refused.set(name, text);
      try {
        if (text) globalThis[kind].setItem(name, text);
        else globalThis[kind].removeItem(name);
        return refused.delete(name);
      } catch {
        return false; // `refused` has it
      }
    },
  };
}

/** Kept for all browser tabs. */
export const browserStorage = storage("localStorage");

/** Kept until this browser tab is closed. */
export const tabStorage = storage("sessionStorage");
