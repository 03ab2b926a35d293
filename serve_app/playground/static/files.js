// Text files that go with a question. The model reads them as text, each in a fence below its name.

const MAX_BYTES = 1_000_000;
const BYTE_ORDERS = { "255,254": "utf-16le", "254,255": "utf-16be" };

/** @typedef {{name: string, text: string}} TextFile */

/** A file that can't be attached; the message says why. */
export class FileError extends Error {}

/**
 * Read a text file.
 * @param {File} file UTF-8, or UTF-16 with a byte order mark.
 * @returns {Promise<TextFile>}
 * @throws {FileError} It is too large or no text.
 */
export async function readText(file) {
  if (file.size > MAX_BYTES) throw new FileError(`${file.name} is larger than 1 MB: paste the part that matters.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  const encoding = BYTE_ORDERS[bytes.subarray(0, 2).join()] ?? "utf-8";
  let text;
  try {
    text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
  } catch {
    throw new FileError(`${file.name} is no text that this page can read: save it as UTF-8.`);
  }
  if (text.includes("\0")) throw new FileError(`${file.name} is no text.`);
  return { name: file.name, text };
}

/**
 * Return a question with its files before it.
 * @param {string} text
 * @param {TextFile[]} files
 */
export function withFiles(text, files = []) {
  const told = files.map(({ name, text: content }) => {
    const fence = fenceAround(content);
    return `${name}:\n\n${fence}\n${content.replace(/\n?$/, "\n")}${fence}\n\n`;
  });
  return `${told.join("")}${text}`;
}

/** @param {string} content @returns {string} More backticks than any line of it begins with. */
function fenceAround(content) {
  const longest = Math.max(2, ...Array.from(content.matchAll(/^ *(`{3,})/gm), ([, run]) => run.length));
  return "`".repeat(longest + 1);
}

const PER_UNIT = 1000;

/** @param {string} text @returns {string} How large it is, for the eye. */
export function sizeOf(text) {
  const bytes = new TextEncoder().encode(text).length;
  return bytes < PER_UNIT ? `${bytes} bytes` : `${Math.round(bytes / PER_UNIT)} KB`;
}
