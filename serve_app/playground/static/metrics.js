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
 * Return the same by the value of a label.
 * @param {string} label @param {Sample[]} before @param {Sample[]} samples
 * @returns {Map<string, number>}
 */
export function growthBy(label, before, samples) {
  const values = [...new Set(samples.map(({ labels }) => labels[label] ?? ""))];
  const own = (value) => samples.filter(({ labels }) => (labels[label] ?? "") === value);
  return new Map(values.map((value) => [value, growth(before, own(value))]));
}

/** @param {number[]} values @returns {number} Their mean; 0 of none. */
export const mean = (values) => values.reduce((sum, value) => sum + value, 0) / (values.length || 1);

/** Sums of times, in seconds, whose growth tells how many requests ran: a text's tokens, its prefill, a pooler's work. */
export const TIMES = [
  "vllm:inter_token_latency_seconds_sum", "vllm:request_prefill_time_seconds_sum", "vllm:e2e_request_latency_seconds_sum",
];

/**
 * Return how many requests ran on average between two readings. By Little's law that is the time that they have taken
 * together, by the time that has passed, so a request of a few milliseconds counts though no snapshot shows it.
 * @param {Record<string, Sample[]>} before @param {Record<string, Sample[]>} now Readings of `TIMES`.
 * @param {number} seconds Between them.
 * @param {Set<string>} generators The ids of the models that generate.
 */
export function averageRunning(before, now, seconds, generators) {
  const [tokens, prefill, whole] = TIMES.map((name) => {
    const generates = ({ labels }) => generators.has(labels.model_name);
    const isWhole = name === TIMES[2];
    const own = (samples) => samples.filter((sample) => generates(sample) !== isWhole);
    return growth(own(before[name] ?? []), own(now[name] ?? []));
  });
  return (tokens + prefill + whole) / seconds;
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
