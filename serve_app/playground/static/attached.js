// What a user attaches to a question: pictures, as data: URIs, and text files.

import { html } from "./vendor/preact.js";
import { FileError, readText, sizeOf } from "./files.js";

const PICTURES = new Set(["image/png", "image/jpeg", "image/webp", "image/gif"]);
/** The pictures that are text, which any model reads. */
const DRAWN = "image/svg+xml";

/**
 * Read files that were chosen, dropped or pasted.
 * @param {File[]} given
 * @param {boolean} takesImages Whether the model does.
 * @returns {Promise<{images: string[], files: import("./files.js").TextFile[], problem: string}>} The problem names
 *   the files that were left out.
 */
export async function readAttached(given, takesImages) {
  const read = { images: /** @type {string[]} */ ([]), files: /** @type {any[]} */ ([]), problem: "" };
  for (const file of given) {
    try {
      if (PICTURES.has(file.type) && takesImages) read.images.push(await dataUri(file));
      else if (PICTURES.has(file.type)) throw new FileError(`${file.name}: this model reads no pictures.`);
      else if (/^(image|audio|video)\//.test(file.type) && file.type !== DRAWN) {
        throw new FileError(`${file.name} can't be sent: only text, PNG, JPEG, WebP and GIF can.`);
      } else read.files.push(await readText(file));
    } catch (error) {
      read.problem = error instanceof FileError ? error.message : `${file.name} can't be read.`;
    }
  }
  return read;
}

/** @param {File} file @returns {Promise<string>} */
const dataUri = (file) =>
  new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(String(reader.result));
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(file);
  });

/**
 * The files of a question that is being written.
 * @param {{images: string[], files: import("./files.js").TextFile[], onRemove: (kind: "images" | "files",
 *   index: number) => void}} props
 */
export function Attached({ images, files, onRemove }) {
  if (!images.length && !files.length) return null;
  return html`
    <ul class="attached" aria-label="Attached files">
      ${images.map((url, index) => html`
        <li key=${`picture ${index}`}>
          <img src=${url} alt=${`Picture ${index + 1}`} />
          <button type="button" class="quiet" aria-label=${`Remove picture ${index + 1}`}
            onClick=${() => onRemove("images", index)}>×</button>
        </li>`)}
      ${files.map(({ name, text }, index) => html`
        <li key=${`file ${index}`} class="file">
          <span>${name} <small>${sizeOf(text)}</small></span>
          <button type="button" class="quiet" aria-label=${`Remove ${name}`}
            onClick=${() => onRemove("files", index)}>×</button>
        </li>`)}
    </ul>`;
}

/** @param {{files: import("./files.js").TextFile[]}} props The files of a question that was asked. */
export const AskedFiles = ({ files = [] }) =>
  files.map(({ name, text }, index) => html`
    <details key=${index} class="asked-file">
      <summary>${name} <small>${sizeOf(text)}</small></summary>
      <pre tabindex="0" role="region" aria-label=${name}><code>${text}</code></pre>
    </details>`);
