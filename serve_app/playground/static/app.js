// The page: its tabs, its key and its colours. Each tab has a module of its own.

import { h, html, render, useCallback, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";
import { ask, readKey, writeKey } from "./api.js";
import { Chat } from "./chat.js";
import { Classify } from "./classify.js";
import { Live } from "./live.js";
import { ErrorNotice, announce } from "./parts.js";
import { Search } from "./search.js";
import { browserStorage } from "./storage.js";

const TABS = { chat: "Chat", classify: "Classify", search: "Search", live: "Live" };
const THEME = "raystream-theme";
const THEMES = { "": "System", light: "Light", dark: "Dark" };
const LOOK_AGAIN_MS = 3000;

/** The models that are served; asks again while there is none. */
function useModels() {
  const [models, setModels] = useState(/** @type {any[]} */ ([]));
  const [error, setError] = useState(/** @type {any} */ (null));
  const load = useCallback(async () => {
    try {
      const answer = await (await ask("v1/models")).json();
      // Tabs that are open stay open while no model is ready.
      setModels((before) => (answer.data.length ? answer.data : before));
      setError(null);
    } catch (problem) {
      setError(problem);
    }
  }, []);
  useEffect(() => {
    load();
  }, []);
  useEffect(() => {
    if (models.length || error?.status === 401) return undefined;
    const timer = setInterval(load, LOOK_AGAIN_MS);
    return () => clearInterval(timer);
  }, [models.length, error?.status]);
  return { models, error, load };
}

/** @returns {[string, (tab: string) => void]} The tab that the address names. */
function useTab() {
  const named = () => (location.hash.slice(1) in TABS ? location.hash.slice(1) : "chat");
  const [tab, setTab] = useState(named);
  useEffect(() => {
    const note = () => setTab(named());
    addEventListener("hashchange", note);
    return () => removeEventListener("hashchange", note);
  }, []);
  const show = (id) => {
    history.replaceState(null, "", `#${id}`);
    setTab(id);
  };
  return [tab, show];
}

function useTheme() {
  const [theme, setTheme] = useState(browserStorage.read(THEME));
  useLayoutEffect(() => {
    document.documentElement.dataset.theme = theme;
    browserStorage.write(THEME, theme);
  }, [theme]);
  const ids = Object.keys(THEMES);
  return [theme, () => setTheme(ids[(ids.indexOf(theme) + 1) % ids.length])];
}

function App() {
  const { models, error, load } = useModels();
  const [tab, show] = useTab();
  const [theme, nextTheme] = useTheme();
  const [isAsking, setAsking] = useState(false);
  const main = useRef(null);
  const openKey = () => setAsking(true);
  const closeKey = () => {
    setAsking(false);
    load();
  };
  const ofTask = (task) => models.filter((model) => model.task === task);
  const classifiers = ofTask("classify").filter(({ labels }) => labels?.length > 1);
  const skip = (event) => {
    event.preventDefault();
    main.current.focus();
  };
  const panels = {
    chat: html`<${Chat} models=${ofTask("generate")} onKey=${openKey} />`,
    classify: html`<${Classify} models=${classifiers} onKey=${openKey} />`,
    search: html`<${Search} models=${ofTask("embed")} chatModels=${ofTask("generate")} onKey=${openKey} />`,
    live: html`<${Live} isShown=${tab === "live"} onKey=${openKey} />`,
  };
  return html`
    <a class="skip" href="#content" onClick=${skip}>Skip to the content</a>
    <header>
      <h1>raystream</h1>
      <${Tabs} tab=${tab} onShow=${show} />
      <div class="row tools">
        <button type="button" class="quiet" onClick=${openKey}>${readKey() ? "Key: set" : "Key"}</button>
        <button type="button" class="quiet" onClick=${nextTheme}>
          <span class="prefix">Colours:${" "}</span>${THEMES[theme]}</button>
        <a href="docs">API</a>
      </div>
    </header>
    <main ref=${main} id="content" tabindex="-1">
      <${ErrorNotice} error=${error} onRetry=${load} onKey=${openKey} />
      ${!error && !models.length && html`<p class="waiting"><span class="dot"></span>Asking for the models</p>`}
      ${Object.keys(TABS).map((id) => html`
        <div key=${id} role="tabpanel" id=${`panel-${id}`} aria-labelledby=${`tab-${id}`} hidden=${id !== tab}>
          ${(models.length > 0 || id === "live") && panels[id]}
        </div>`)}
    </main>
    <footer>
      <a href="docs">API</a> <a href="playground/vendor/LICENCES.txt">Licences</a>
    </footer>
    <div id="status" class="unseen" role="status"></div>
    ${isAsking && html`<${KeyDialog} onClose=${closeKey} />`}`;
}

function Tabs({ tab, onShow }) {
  const ids = Object.keys(TABS);
  const onKeyDown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const ends = { Home: 0, End: ids.length - 1 }[event.key];
    if (step === undefined && ends === undefined) return;
    event.preventDefault();
    const id = ids[ends ?? (ids.indexOf(tab) + step + ids.length) % ids.length];
    onShow(id);
    document.getElementById(`tab-${id}`)?.focus();
  };
  return html`
    <div class="tabs" role="tablist" aria-label="What to do" onKeyDown=${onKeyDown}>
      ${ids.map((id) => html`
        <button type="button" role="tab" id=${`tab-${id}`} aria-controls=${`panel-${id}`}
          aria-selected=${id === tab ? "true" : "false"} tabindex=${id === tab ? 0 : -1}
          onClick=${() => onShow(id)}>${TABS[id]}</button>`)}
    </div>`;
}

/** Asks for the key; only this browser tab keeps it. */
function KeyDialog({ onClose }) {
  const dialog = useRef(null);
  const [key, setKey] = useState(readKey());
  useEffect(() => dialog.current.showModal(), []);
  const use = (event) => {
    event.preventDefault();
    writeKey(key.trim());
    announce(key.trim() ? "The key is set." : "The key is forgotten.");
    dialog.current.close();
  };
  return html`
    <dialog ref=${dialog} onClose=${onClose} aria-labelledby="key-title">
      <form onSubmit=${use}>
        <h2 id="key-title">Key</h2>
        <p class="detail">It is sent with each request to this server, and forgotten when this browser tab is
          closed.</p>
        <label class="field">
          <span>API key</span>
          <input type="password" autocomplete="off" spellcheck="false" value=${key}
            onInput=${(event) => setKey(event.target.value)} />
        </label>
        <p class="row">
          <button class="primary">Use it</button>
          <button type="button" class="quiet" onClick=${() => dialog.current.close()}>Cancel</button>
        </p>
      </form>
    </dialog>`;
}

render(h(App, null), document.getElementById("app"));
