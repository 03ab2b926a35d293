// A chart over time, drawn by uPlot in the page's colours.

import { html, useEffect, useRef } from "./vendor/preact.js";
import { load } from "./later.js";

const HEIGHT = 160;
const LEAST_S = 60;
/** The steps between the marks of an axis of bytes, and of an axis of counts. */
const BYTES = Array.from({ length: 24 }, (_, power) => 2 ** (power + 20));
const COUNTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000];
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
const NUM_COLOURS = 4;

/**
 * @param {{label: string, x: number[], lines: {name: string, values: (number | null)[]}[],
 *   format: (value: number) => string, isBytes?: boolean}} props Times in Unix seconds.
 */
export function Chart({ label, x, lines, format, isBytes = false }) {
  const element = useRef(null);
  const plot = useRef(/** @type {any} */ (null));
  const names = lines.map(({ name }) => name).join(" ");
  const data = useRef(/** @type {any[]} */ ([]));
  data.current = [x, ...lines.map(({ values }) => values)];
  useEffect(() => {
    let isShown = true;
    const draw = () => {
      if (!isShown || !globalThis.uPlot) return;
      plot.current?.destroy();
      const options = optionsOf(lines, format, isBytes, element.current);
      plot.current = new globalThis.uPlot(options, data.current, element.current);
    };
    load("uplot.css", "uplot.js").then(draw, () => {});
    // The colours change with the scheme and the theme, the width with the window.
    const themes = new MutationObserver(draw);
    themes.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", draw);
    const widths = new ResizeObserver(([{ contentRect }]) => {
      if (contentRect.width) plot.current?.setSize({ width: contentRect.width, height: HEIGHT });
    });
    widths.observe(element.current);
    return () => {
      isShown = false;
      themes.disconnect();
      widths.disconnect();
      scheme.removeEventListener("change", draw);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [names]);
  useEffect(() => plot.current?.setData(data.current), [x.at(-1), x.length]);
  const latest = lines.map(({ name, values }) => `${name} ${format(values.findLast((each) => each !== null) ?? 0)}`);
  return html`
    <figure class="chart">
      <figcaption>${label}
        ${latest.map((each, index) => html`
          <span class="key" key=${index}><span class=${`stroke chart-${index % NUM_COLOURS}`}></span>${each}</span>`)}
      </figcaption>
      <div ref=${element} role="img" aria-label=${`${label}, over time. Now ${latest.join(", ")}.`}></div>
    </figure>`;
}

/**
 * Return the colour that a custom property has under the present scheme, as a canvas can use it.
 * @param {HTMLElement} element @param {string} name
 */
function colourOf(element, name) {
  element.style.color = `var(${name})`;
  const { color } = getComputedStyle(element);
  element.style.color = "";
  return color;
}

function optionsOf(lines, format, isBytes, element) {
  const colour = (name) => colourOf(element, name);
  const axis = {
    stroke: colour("--quiet"), font: "12px system-ui, sans-serif",
    grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false },
  };
  return {
    width: element.clientWidth || 300,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: {
      x: { range: (_, first, last) => [Math.min(first, last - LEAST_S), last] },
      y: { range: (_, __, most) => [0, most ? most * 1.15 : 1] },
    },
    axes: [
      { ...axis, values: "{HH}:{mm}:{ss}", space: 90, size: 30 },
      { ...axis, size: 72, incrs: isBytes ? BYTES : COUNTS, space: 28, values: (_, splits) => splits.map(format) },
    ],
    series: [
      {},
      ...lines.map(({ name }, index) => ({
        label: name,
        stroke: colour(`--chart-${index % NUM_COLOURS}`),
        dash: DASHES[Math.floor(index / NUM_COLOURS) % DASHES.length],
        width: 2,
        spanGaps: true, // replicas take their samples at different moments
        points: { show: false },
      })),
    ],
  };
}
