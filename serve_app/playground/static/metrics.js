// Prometheus's text format, as far as the tab "Live" reads it.

const LINE = /^([\w:]+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** @typedef {{labels: Record<string, string>, value: number}} Sample */

/**
 * Return the samples of some metrics.
 * @param {string} text
 * @param {string[]} names
 * @returns {Record<string, Sample[]>} By the metric's name; an empty list if there is none.
 */
export function samplesOf(text, names) {
  const found = Object.fromEntries(names.map((name) => [name, /** @type {Sample[]} */ ([])]));
  for (const line of text.split("\n")) {
    const [, name, labels = "", value] = LINE.exec(line) ?? [];
    if (name && name in found) {
      const pairs = [...labels.matchAll(LABEL)].map(([, key, text_]) => [key, text_]);
      found[name].push({ labels: Object.fromEntries(pairs), value: Number(value) });
    }
  }
  return found;
}

/** @param {Sample} sample */
const seriesOf = ({ labels }) => JSON.stringify(labels);

/**
 * Return what counters have gained since a reading. A process that has come or gone since counts as nothing.
 * @param {Sample[]} samples
 * @param {Sample[]} before
 */
export function gained(samples, before) {
  const known = new Map(before.map((sample) => [seriesOf(sample), sample.value]));
  return samples.reduce(
    (sum, sample) => sum + Math.max(0, sample.value - (known.get(seriesOf(sample)) ?? sample.value)), 0);
}

/**
 * Return samples, with those of processes that are gone, so that a sum of counters never falls.
 * @param {Sample[]} samples
 * @param {Sample[]} before
 */
export function withGone(samples, before) {
  const present = new Set(samples.map(seriesOf));
  return [...samples, ...before.filter((sample) => !present.has(seriesOf(sample)))];
}

/** @param {Sample[]} samples @param {Record<string, string>} wanted Labels that count. */
export const total = (samples, wanted = {}) =>
  samples
    .filter(({ labels }) => Object.entries(wanted).every(([key, value]) => labels[key] === value))
    .reduce((sum, { value }) => sum + value, 0);
