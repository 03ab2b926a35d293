// The page: its tabs, its key and its colours. Each tab has a module of its own.

import { h, html, render, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";
import { readKey, writeKey } from "./api.js";
import { Chat } from "./chat.js";
import { Classify } from "./classify.js";
import { Compare } from "./compare.js";
import { Icon } from "./icons.js";
import { Live } from "./live.js";
import { stateText, useModels } from "./models.js";
import { ErrorNotice, announce } from "./parts.js";
import { Search } from "./search.js";
import { ShortcutsButton, useShortcuts } from "./shortcuts.js";
import { browserStorage } from "./storage.js";
import { Tabs, useTab } from "./tabs.js";

const TABS = { chat: "Chat", compare: "Compare", classify: "Classify", search: "Search", live: "Live" };
const THEME = "raystream-theme";
const THEMES = { "": "System", light: "Light", dark: "Dark" };

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
  const [tab, show] = useTab(TABS);
  const [theme, nextTheme] = useTheme();
  const [isAsking, setAsking] = useState(false);
  const main = useRef(null);
  // A tab is made when it is shown first, and then stays as it was left.
  const seen = useRef(new Set());
  seen.current.add(tab);
  const openKey = () => setAsking(true);
  const closeKey = () => {
    setAsking(false);
    load();
  };
  useShortcuts((index) => show(Object.keys(TABS)[index]), Object.keys(TABS).length);
  const ofTask = (task) => models.filter((model) => model.task === task);
  const classifiers = ofTask("classify").filter(({ labels }) => labels?.length > 1);
  const unknown = ofTask("classify").find(({ labels }) => !labels);
  const skip = (event) => {
    event.preventDefault();
    main.current.focus();
  };
  const panels = {
    chat: html`<${Chat} models=${ofTask("generate")} onModels=${load} onKey=${openKey} />`,
    compare: html`<${Compare} models=${ofTask("generate").filter((model) => model.has_chat_template !== false)} onModels=${load} onKey=${openKey} />`,
    classify: unknown && !classifiers.length
      ? html`<p class="empty">${unknown.id}: ${stateText(unknown.state)}. ${unknown.failure}</p>`
      : html`<${Classify} models=${classifiers} onKey=${openKey} />`,
    search: html`<${Search} models=${ofTask("embed")} chatModels=${ofTask("generate")} onKey=${openKey} />`,
    live: html`<${Live} isShown=${tab === "live"} onKey=${openKey} />`,
  };
  return html`
    <a class="skip" href="#content" onClick=${skip}>Skip to the content</a>
    <header>
      <div class="brand">
        <h1>raystream</h1>
        <p class="tagline">Streams that outlive their replicas</p>
      </div>
      <${Tabs} names=${TABS} tab=${tab} onShow=${show} />
      <div class="row tools">
        <${ShortcutsButton} />
        <button type="button" class="quiet" onClick=${openKey}>
          <${Icon} name="key" /><span class="name">${readKey() ? "Key: set" : "Key"}</span></button>
        <button type="button" class="quiet" onClick=${nextTheme}>
          <${Icon} name="theme" /><span class="prefix">Colours:${" "}</span><span class="name">${THEMES[theme]}</span></button>
        <a href="docs">API</a>
      </div>
    </header>
    <main ref=${main} id="content" tabindex="-1">
      <${ErrorNotice} error=${error} onRetry=${load} onKey=${openKey} />
      ${!error && !models.length && html`<p class="waiting"><span class="dot"></span>Asking for the models</p>`}
      ${Object.keys(TABS).map((id) => html`
        <div key=${id} role="tabpanel" id=${`panel-${id}`} aria-labelledby=${`tab-${id}`} hidden=${id !== tab}>
          ${seen.current.has(id) && (models.length > 0 || id === "live") && panels[id]}
        </div>`)}
    </main>
    <footer>
      <a href="docs">API</a> <a href="playground/vendor/LICENCES.txt">Licences</a>
    </footer>
    <div id="status" class="unseen" role="status"></div>
    ${isAsking && html`<${KeyDialog} onClose=${closeKey} />`}`;
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
