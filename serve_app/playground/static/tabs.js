// The page's tabs. Each one that is shown is an entry of the browser's history, and keeps its place.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";

/**
 * @param {Record<string, string>} names The tabs' names, by id; the first is shown at first.
 * @returns {[string, (id: string, isPassing?: boolean) => void]} The tab that the address names, and a function that
 *   shows another one: as a new entry of the history unless it is only passed on the way to another one.
 */
export function useTab(names) {
  const [first] = Object.keys(names);
  const named = () => (Object.hasOwn(names, location.hash.slice(1)) ? location.hash.slice(1) : first);
  const [tab, setTab] = useState(named);
  const places = useRef(/** @type {Record<string, number>} */ ({}));
  const change = (id) => {
    setTab((before) => {
      if (before !== id) places.current[before] = scrollY;
      return id;
    });
  };
  useEffect(() => {
    const note = () => change(named());
    addEventListener("popstate", note);
    addEventListener("hashchange", note);
    return () => {
      removeEventListener("popstate", note);
      removeEventListener("hashchange", note);
    };
  }, []);
  useLayoutEffect(() => {
    document.title = `${names[tab]} · raystream`;
    if (tab in places.current) scrollTo(0, places.current[tab]);
  }, [tab]);
  const show = (id, isPassing = false) => {
    if (id === tab) return;
    history[isPassing ? "replaceState" : "pushState"](null, "", `#${id}`);
    change(id);
  };
  return [tab, show];
}

/** @param {{names: Record<string, string>, tab: string, onShow: (id: string, isPassing?: boolean) => void}} props */
export function Tabs({ names, tab, onShow }) {
  const ids = Object.keys(names);
  const onKeyDown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const ends = { Home: 0, End: ids.length - 1 }[event.key];
    if (step === undefined && ends === undefined) return;
    event.preventDefault();
    const id = ids[ends ?? (ids.indexOf(tab) + step + ids.length) % ids.length];
    onShow(id, true);
    document.getElementById(`tab-${id}`)?.focus();
  };
  return html`
    <div class="tabs" role="tablist" aria-label="What to do" onKeyDown=${onKeyDown}>
      ${ids.map((id) => html`
        <button type="button" role="tab" id=${`tab-${id}`} aria-controls=${`panel-${id}`}
          aria-selected=${id === tab ? "true" : "false"} tabindex=${id === tab ? 0 : -1}
          onClick=${() => onShow(id)}>${names[id]}</button>`)}
    </div>`;
}
