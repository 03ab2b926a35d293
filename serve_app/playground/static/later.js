// Libraries that most visits don't need: they are loaded when something is first drawn by them.
//
// index.html holds their tags in a template, from which a browser loads nothing. A tag brings the digest with it, so
// a file that was changed does not run here, either.

const loading = new Map();

/** @param {string} name @returns {HTMLElement | null} */
const tagOf = (name) =>
  /** @type {HTMLTemplateElement} */ (document.getElementById("later")).content
    .querySelector(`[href$="/${name}"], [src$="/${name}"]`);

/**
 * Load vendored scripts, style sheets and fonts, once.
 * @param {...string} names As index.html names the files.
 * @returns {Promise<void>} Rejected if one can't be had; the next call tries again.
 */
export async function load(...names) {
  await Promise.all(names.map((name) => {
    if (!loading.has(name)) {
      const promise = loaded(document.importNode(tagOf(name)));
      loading.set(name, promise);
      promise.catch(() => loading.delete(name));
    }
    return loading.get(name);
  }));
}

/** @param {any} tag */
const loaded = (tag) => (tag.as === "font" ? fontOf(tag) : new Promise((done, fail) => {
  tag.onload = () => done(undefined);
  tag.onerror = () => fail(new Error(`${tag.src || tag.href} can't be loaded.`));
  document.head.append(tag);
}));

/**
 * The page's policy names no source of fonts. A font that the page has fetched itself is data, as a picture is that
 * its user has chosen.
 * @param {HTMLLinkElement} tag Of a file that is named FAMILY-STYLE.woff2.
 */
async function fontOf(tag) {
  const { integrity } = tag;
  const answer = await fetch(new URL(tag.getAttribute("href"), document.baseURI), { integrity });
  const [, family, style] = /([^/]+)-(\w+)\.woff2$/.exec(tag.getAttribute("href"));
  const font = new FontFace(family, await answer.arrayBuffer(), {
    weight: style.startsWith("Bold") ? "700" : "400", style: style.endsWith("Italic") ? "italic" : "normal",
  });
  document.fonts.add(await font.load());
}

const tasks = /** @type {(() => void)[]} */ ([]);
const SLICE_MS = 6;

/**
 * Do something soon, a little at a time, so that the page is never held up by much of it.
 * @param {() => void} task
 */
export function soon(task) {
  tasks.push(task);
  if (tasks.length === 1) setTimeout(work);
}

function work() {
  const begunMs = performance.now();
  while (tasks.length && performance.now() - begunMs < SLICE_MS) {
    try {
      tasks[0]();
    } finally {
      tasks.shift();
    }
  }
  if (tasks.length) setTimeout(work, SLICE_MS);
}
