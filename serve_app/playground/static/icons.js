// Small pictures for buttons. Each stands beside the button's name, so readers of screens are not told of it.

import { html } from "./vendor/preact.js";

const PATHS = {
  send: "M8 13V3M3.5 7.5 8 3l4.5 4.5",
  stop: "M4 4h8v8H4z",
  edit: "m3 13 .7-3L10.8 3l2.2 2.2-7 7.1zM9.5 4.3l2.2 2.2",
  again: "M13 3v3.5H9.5M12.8 6.3A5.2 5.2 0 1 0 13 9.5",
  copy: "M6 6h7v7H6zM3 10V3h7",
  plus: "M8 3v10M3 8h10",
  picture: "M2.5 3.5h11v9h-11zM2.5 10.5l3-3 3 3 2-2 3 3M10.5 6h.01",
  down: "M8 3v10M3.5 8.5 8 13l4.5-4.5",
  key: "M10.5 9.5a3.5 3.5 0 1 0-3.2-2L2.5 12.3v1.2h2.3v-1.7h1.7l2-2.3M11 5h.01",
  theme: "M8 2.5a5.5 5.5 0 1 0 0 11zM8 2.5a5.5 5.5 0 0 1 0 11",
  keys: "M1.5 4h13v8h-13zM4 6.5h.01M6.7 6.5h.01M9.3 6.5h.01M12 6.5h.01M4.5 9.5h7",
  wake: "M8 1.5v1.7M8 12.8v1.7M1.5 8h1.7M12.8 8h1.7M3.4 3.4l1.2 1.2M11.4 11.4l1.2 1.2M3.4 12.6l1.2-1.2M11.4 4.6l1.2-1.2M8 5.3a2.7 2.7 0 1 0 0 5.4 2.7 2.7 0 0 0 0-5.4",
};

/** @param {{name: keyof typeof PATHS}} props */
export const Icon = ({ name }) => html`
  <svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
