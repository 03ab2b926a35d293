// The batches of the tab "Live", from /v1/batches: how far each is, and the button that cancels it. Loaded only from a
// server that keeps them.

import { html, useState } from "./vendor/preact.js";
import { ask, readKey } from "./api.js";
import { ErrorNotice, announce, number } from "./parts.js";

/** Answers of a server that keeps no batches any more, or of a gateway that hides the route. */
const NONE_KEPT = [403, 404];
const CANCELLABLE = ["validating", "in_progress"];
const MOST = 20;

/**
 * Return the newest batches. An error is returned, too: it must not hide the replicas.
 * @param {AbortSignal} signal
 * @returns {Promise<{data: any[], hasMore: boolean, error: any} | null>} Null if the server keeps none.
 */
export async function readBatches(signal) {
  try {
    const { data, has_more: hasMore } = await (await ask(`v1/batches?limit=${MOST}`, { signal })).json();
    return { data, hasMore, error: null };
  } catch (error) {
    if (signal.aborted) throw error;
    return NONE_KEPT.includes(error.status) ? null : { data: [], hasMore: false, error };
  }
}

const UNITS = [[86_400, "d"], [3_600, "h"], [60, "min"], [1, "s"]];

/** @param {number} seconds @returns {string} In the largest unit that it fills, such as 3 h. */
export function age(seconds) {
  const [length, unit] = UNITS.find(([each]) => seconds >= each) ?? UNITS[3];
  return `${number(Math.max(0, Math.floor(seconds / length)))} ${unit}`;
}

/** @param {{batches: {data: any[], hasMore: boolean, error: any}, onChange: () => void}} props */
export const Batches = ({ batches: { data, hasMore, error }, onChange }) => html`
  <section class="model" aria-label="Batches">
    <h3>Batches</h3>
    <${ErrorNotice} error=${error} />
    ${data.length > 0 && html`
      <div class="scroll" tabindex="0" role="region" aria-label="How far each batch is">
        <table>
          <thead>
            <tr>
              <th>Batch</th><th>Status</th><th>Progress</th><th class="amount">Completed</th>
              <th class="amount">Failed</th><th class="amount">Lines</th><th class="amount">Age</th>
              <td></td>
            </tr>
          </thead>
          <tbody>${data.map((batch) => html`<${Row} key=${batch.id} batch=${batch} onChange=${onChange} />`)}</tbody>
        </table>
      </div>`}
    ${!error && html`<p class="detail">${data.length ? `The newest${hasMore ? ` ${MOST}` : ""}` : "None"}${
      readKey() && " of this key"}. A batch that is cancelled keeps the results that it has.</p>`}
  </section>`;

/** One batch; its button asks once more before it cancels. */
function Row({ batch, onChange }) {
  const [isAsked, setAsked] = useState(false);
  const [error, setError] = useState(/** @type {any} */ (null));
  const { id, status, request_counts: counts } = batch;
  const done = counts.completed + counts.failed;
  const cancel = async () => {
    setAsked(false);
    setError(null);
    try {
      await ask(`v1/batches/${id}/cancel`, { body: {} });
      announce(`${id} is being cancelled.`);
      onChange();
    } catch (problem) {
      setError(problem);
    }
  };
  return html`
    <tr>
      <td><code>${id}</code></td>
      <td>${status.replace("_", " ")}${batch.errors && html`<p class="detail">${batch.errors.data[0].message}</p>`}</td>
      <td><progress aria-label=${`Lines of ${id} with a result`} max=${counts.total || 1}
        value=${done}></progress></td>
      <td class="amount">${number(counts.completed)}</td>
      <td class="amount">${number(counts.failed)}</td>
      <td class="amount">${number(counts.total)}</td>
      <td class="amount">${age(Date.now() / 1000 - batch.created_at)}</td>
      <td class="amount">
        <${ErrorNotice} error=${error} />
        ${CANCELLABLE.includes(status) && (isAsked
          ? html`
            <button type="button" onClick=${cancel} aria-label=${`Cancel ${id} now`}>Cancel now</button>
            <button type="button" class="quiet" onClick=${() => setAsked(false)}>Keep it</button>`
          : html`<button type="button" class="quiet" onClick=${() => setAsked(true)}
              aria-label=${`Cancel ${id}`}>Cancel</button>`)}
      </td>
    </tr>`;
}
