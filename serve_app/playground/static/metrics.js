// Prometheus's text format, as far as the tab "Live" reads it.

const LINE = /^([\w:]+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** @typedef {{series: string, labels: Record<string, string>, value: number}} Sample The series: its labels as text. */

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
      found[name].push({ series: labels, labels: Object.fromEntries(pairs), value: Number(value) });
    }
  }
  return found;
}

/** @param {Sample[]} samples @param {Record<string, string>} wanted Labels that count. */
export const total = (samples, wanted = {}) =>
  samples
    .filter(({ labels }) => Object.entries(wanted).every(([key, value]) => labels[key] === value))
    .reduce((sum, { value }) => sum + value, 0);

/**
 * Return how much a counter has grown since the reading before. Only series of both readings count: a process that
 * has begun or come back brings what it has counted before.
 * @param {Sample[]} before @param {Sample[]} samples
 */
export function growth(before, samples) {
  const values = new Map(before.map(({ series, value }) => [series, value]));
  return samples.reduce((sum, { series, value }) => sum + Math.max(0, value - (values.get(series) ?? value)), 0);
}

/**
 * Return a counter's samples with those that only an earlier reading had: what a process has counted stays counted
 * after its end.
 * @param {Sample[]} before @param {Sample[]} samples
 */
export function lasting(before, samples) {
  const kept = new Map(before.map((sample) => [sample.series, sample]));
  for (const sample of samples) {
    const value = Math.max(sample.value, kept.get(sample.series)?.value ?? 0);
    kept.set(sample.series, { ...sample, value });
  }
  return [...kept.values()];
}
