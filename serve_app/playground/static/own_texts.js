// A field for many texts: lines that are pasted or written, or a file that is dropped.

import { html, useState } from "./vendor/preact.js";
import { FileError, readText } from "./files.js";
import { number } from "./parts.js";
import { likeliestColumn, linesOf, rowsOf } from "./table.js";

/**
 * @typedef {object} Own
 * @property {string} lines As they were written.
 * @property {import("./table.js").Table | null} table A file of CSV, in place of the lines.
 * @property {number} column Of the table.
 * @property {boolean} hasNames Whether the table's first row names its columns.
 */

/** @type {Own} */
export const NO_TEXTS = { lines: "", table: null, column: 0, hasNames: true };

/** @param {Own} own @returns {string[][]} The table's rows, without the columns' names; [] without a table. */
const contentOf = ({ table, hasNames }) => table?.rows.slice(hasNames ? 1 : 0) ?? [];

/**
 * Return the texts, and the row that each comes from.
 * @param {Own} own
 * @returns {{texts: string[], rows: string[][], names: string[]}} The names of the rows' columns.
 */
export function textsOf(own) {
  if (!own.table) {
    const texts = linesOf(own.lines);
    return { texts, rows: texts.map((text) => [text]), names: ["text"] };
  }
  const rows = contentOf(own).filter((row) => row[own.column]?.trim());
  const [first] = own.table.rows;
  const names = first.map((name, index) => (own.hasNames ? name : `column ${index + 1}`));
  return { texts: rows.map((row) => row[own.column]), rows, names };
}

/** @param {{own: Own, onChange: (own: Own) => void, rows?: number}} props */
export function OwnTexts({ own, onChange, rows = 7 }) {
  const [problem, setProblem] = useState("");
  const { texts } = textsOf(own);
  const read = async ([file]) => {
    if (!file) return;
    try {
      const { name, text } = await readText(file);
      const table = /\.(csv|tsv)$/i.test(name) ? rowsOf(text) : [];
      if (!table.length) onChange({ ...own, lines: text, table: null });
      else onChange({ ...own, table: { name, rows: table }, column: likeliestColumn(table), hasNames: table.length > 1 });
      setProblem("");
    } catch (error) {
      setProblem(error instanceof FileError ? error.message : `${file.name} can't be read.`);
    }
  };
  const onDragOver = (event) => {
    if (event.dataTransfer.types.includes("Files")) event.preventDefault();
  };
  const onDrop = (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    read(event.dataTransfer.files);
  };
  return html`
    <div class="own" onDragOver=${onDragOver} onDrop=${onDrop}>
      ${own.table
        ? html`<${TableChoice} own=${own} onChange=${onChange} />`
        : html`
          <label class="field">
            <span>Texts, one a line</span>
            <textarea rows=${rows} value=${own.lines} placeholder="Paste lines, or drop a .txt or .csv file"
              onInput=${(event) => onChange({ ...own, lines: event.target.value })}></textarea>
          </label>`}
      <p class="row">
        <label class="button quiet">
          <input type="file" class="unseen" accept=".txt,.csv,.tsv,text/plain,text/csv"
            onChange=${(event) => { read([...event.target.files]); event.target.value = ""; }} />
          Open a file
        </label>
        <span class="detail">${number(texts.length)} text${texts.length === 1 ? "" : "s"}</span>
      </p>
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    </div>`;
}

function TableChoice({ own, onChange }) {
  const { table, column, hasNames } = own;
  const { names } = textsOf(own);
  return html`
    <div class="row bottom file-choice">
      <p><strong>${table.name}</strong></p>
      <label class="field">
        <span>Column with the texts</span>
        <select value=${column} onChange=${(event) => onChange({ ...own, column: Number(event.target.value) })}>
          ${names.map((name, index) => html`
            <option value=${index} selected=${index === column}>${name || `column ${index + 1}`}</option>`)}
        </select>
      </label>
      <label class="check">
        <input type="checkbox" checked=${hasNames}
          onChange=${(event) => onChange({ ...own, hasNames: event.target.checked })} />
        The first row names the columns
      </label>
      <button type="button" class="quiet" onClick=${() => onChange({ ...own, table: null })}>Close the file</button>
    </div>`;
}

/** @param {{label: string, choices: Record<string, string>, value: string, onChange: (value: string) => void}} props */
export const Switch = ({ label, choices, value, onChange }) => html`
  <fieldset class="switch">
    <legend class="unseen">${label}</legend>
    ${Object.entries(choices).map(([id, name]) => html`
      <label key=${id} class="chip button">
        <input type="radio" class="unseen" name=${label} value=${id} checked=${id === value}
          onChange=${() => onChange(id)} />
        ${name}
      </label>`)}
  </fieldset>`;
