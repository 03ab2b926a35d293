// Texts that a user brings, as lines or as a table, and tables that the page gives back, as CSV.

/** @typedef {{name: string, rows: string[][]}} Table A file's rows; the first one may name the columns. */

/** @param {string} text @returns {string[]} Its lines that are not empty. */
export const linesOf = (text) => text.split(/\r\n|\r|\n/).map((line) => line.trim()).filter(Boolean);

/**
 * Read CSV with commas, semicolons or tabs, whichever the first line has most of.
 * @param {string} text
 * @returns {string[][]} Rows of as many cells as they have; empty rows are left out.
 * Source: RFC 4180
 */
export function rowsOf(text) {
  const [first] = text.split("\n", 1);
  const count = (sign) => first.split(sign).length;
  const separator = [",", ";", "\t"].reduce((best, sign) => (count(sign) > count(best) ? sign : best));
  const rows = [];
  let row = [];
  const cell = new RegExp(`(?:"((?:[^"]|"")*)"|([^${separator}\\r\\n]*))(${separator}|\\r\\n|\\r|\\n|$)`, "y");
  while (cell.lastIndex < text.length) {
    const [, quoted, plain, end] = cell.exec(text);
    row.push(quoted === undefined ? plain : quoted.replaceAll('""', '"'));
    if (end === separator && cell.lastIndex < text.length) continue;
    if (end === separator) row.push("");
    if (row.some((each) => each !== "")) rows.push(row);
    row = [];
  }
  return rows;
}

/**
 * Write CSV that spreadsheets may open: a text that they would run as a formula begins with an apostrophe.
 * @param {(string | number)[][]} rows
 * @returns {string}
 * Source: https://owasp.org/www-community/attacks/CSV_Injection
 */
export const csvOf = (rows) => rows.map((row) => `${row.map(quoted).join(",")}\r\n`).join("");

/** @param {string | number} value */
function quoted(value) {
  const isFormula = typeof value === "string" && /^[=+\-@\t\r]/.test(value) && Number.isNaN(Number(value));
  const text = isFormula ? `'${value}` : String(value);
  return /[",\r\n]|^\s|\s$/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/**
 * Return the column that most likely holds the texts: the one with the longest cells.
 * @param {string[][]} rows
 */
export function likeliestColumn(rows) {
  const sizes = [];
  for (const row of rows) row.forEach((cell, index) => { sizes[index] = (sizes[index] ?? 0) + cell.length; });
  return Math.max(0, sizes.indexOf(Math.max(...sizes)));
}
