// The list of conversations: search, open, rename, delete with undo, export and import.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { importedText } from "./conversations.js";
import { announce } from "./parts.js";
import { download } from "./saving.js";

const WIDE = matchMedia("(min-width: 80rem)");
const SEARCH_MS = 150;

/** @param {number} ms Since 1970. @returns {string} The time of today, or the day. */
function when(ms) {
  const then = new Date(ms);
  const isToday = then.toDateString() === new Date().toDateString();
  return isToday
    ? then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })
    : then.toLocaleDateString([], { day: "numeric", month: "short", year: "numeric" });
}

/** @returns {[boolean, (isOpen: boolean) => void]} A wide window always shows the list. */
function useOpen() {
  const [isWide, setWide] = useState(WIDE.matches);
  const [isOpen, setOpen] = useState(false);
  useEffect(() => {
    const note = () => setWide(WIDE.matches);
    WIDE.addEventListener("change", note);
    return () => WIDE.removeEventListener("change", note);
  }, []);
  return [isWide || isOpen, (shall) => !isWide && setOpen(shall)];
}

/** @param {{it: import("./conversations.js").Conversations}} props */
export function ConversationList({ it }) {
  const [isOpen, setOpen] = useOpen();
  const [query, setQuery] = useState("");
  const [found, setFound] = useState(/** @type {Set<string> | null} */ (null));
  const [problem, setProblem] = useState("");
  const [notice, setNotice] = useState("");
  const search = useRef(null);
  const summary = useRef(null);
  useEffect(() => {
    if (!query.trim()) return setFound(null);
    let isWanted = true;
    const timer = setTimeout(async () => {
      const ids = await it.find(query);
      if (!isWanted) return;
      setFound(ids);
      announce(`${ids.size} conversations found.`);
    }, SEARCH_MS);
    return () => {
      isWanted = false;
      clearTimeout(timer);
    };
  }, [query, it.list]);
  const shown = found ? it.list.filter(({ id }) => found.has(id)) : it.list;
  const running = it.list.filter(({ id }) => it.isRunning(id)).map(({ id }) => id).join();
  const open = async (id) => {
    setNotice("");
    await it.open(id);
    if (WIDE.matches) return;
    setOpen(false); // the list hides what it has opened, and the button that has the focus with it
    summary.current?.focus();
  };
  const undo = async () => {
    await it.undo();
    search.current?.focus();
  };
  const remove = async (ids) => {
    await it.remove(ids);
    // The focus goes where the next step is likely.
    (document.getElementById("undo") ?? search.current)?.focus();
  };
  const importFile = async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    let [told, wrong] = ["", ""];
    try {
      told = importedText(await it.import(await file.text()));
    } catch (error) {
      wrong = error.message;
    }
    setNotice(told);
    setProblem(wrong);
  };
  // A growing answer draws the chat again and again, but not the list.
  const items = useMemo(() => html`
    <ul class="conversations">
      ${shown.map((each) => html`
        <${Item} key=${each.id} each=${each} it=${it} isCurrent=${each.id === it.current.id}
          isRunning=${it.isRunning(each.id)} onOpen=${open} onRemove=${remove} />`)}
    </ul>`, [it.list, it.current.id, running, found]);
  return html`
    <nav class="history" aria-label="Conversations">
      <details open=${isOpen} onToggle=${(event) => setOpen(event.currentTarget.open)}>
        <summary ref=${summary}>Conversations <small>${it.list.length || ""}</small></summary>
        ${it.list.length > 0 && html`
          <label class="field">
            <span class="unseen">Search the conversations</span>
            <input ref=${search} type="search" placeholder="Search" value=${query}
              onInput=${(event) => setQuery(event.target.value)} />
          </label>`}
        ${it.deleted.length > 0 && html`
          <p class="undo" role="status">
            <span>${it.deleted.length === 1 ? "Deleted." : `${it.deleted.length} deleted.`}</span>
            <button type="button" id="undo" class="quiet" onClick=${undo}>Undo</button>
          </p>`}
        ${items}
        ${found && !shown.length && html`<p class="detail">No conversation holds that.</p>`}
        ${!it.list.length && html`<p class="detail">What you ask is kept in this browser.</p>`}
        ${!it.isKept && html`<p class="detail problem">This browser keeps no data for the page: conversations are lost
          when it is left. Export what you need.</p>`}
        ${notice && html`<p class="detail">${notice}</p>`}
        ${problem && html`<p class="problem" role="alert">${problem}</p>`}
        <div class="row transfer">
          ${it.list.length > 0 && html`
            <button type="button" class="quiet" onClick=${async () => download("raystream-conversations.json",
              await it.export(), "application/json")}>Export all</button>`}
          <label class="button quiet">
            <input type="file" class="unseen" accept="application/json,.json" onChange=${importFile} />
            Import
          </label>
          ${it.list.length > 1 && html`
            <button type="button" class="quiet" onClick=${() => remove(it.list.map(({ id }) => id))}>Delete
              all</button>`}
        </div>
      </details>
    </nav>`;
}

function Item({ each, it, isCurrent, isRunning, onOpen, onRemove }) {
  const [draft, setDraft] = useState(/** @type {string | null} */ (null));
  const [isOpen, setOpen] = useState(false);
  const input = useRef(null);
  const more = useRef(null);
  const { id, shownTitle: title } = each;
  useEffect(() => input.current?.select(), [draft === null]);
  const close = () => {
    setDraft(null);
    setOpen(false);
    requestAnimationFrame(() => document.querySelector(":focus") || more.current?.focus()); // a box may have it
  };
  const onEscape = (event) => {
    if (event.key !== "Escape" || !(isOpen || draft !== null)) return;
    event.stopPropagation(); // else it stops the answer
    close();
  };
  const rename = async (event) => {
    event.preventDefault();
    await it.rename(id, draft);
    close();
  };
  if (draft !== null) {
    return html`
      <li>
        <form class="rename" onSubmit=${rename} onKeyDown=${onEscape}>
          <label class="field">
            <span class="unseen">Name of the conversation</span>
            <input ref=${input} value=${draft} maxlength="200" onInput=${(event) => setDraft(event.target.value)} />
          </label>
          <button class="quiet">Save</button>
        </form>
      </li>`;
  }
  const save = async () => download(`${fileNameOf(title)}.json`, await it.export(id), "application/json");
  return html`
    <li onKeyDown=${onEscape}>
      <button type="button" class="open" aria-current=${isCurrent ? "true" : undefined} onClick=${() => onOpen(id)}>
        <span class="title" dir="auto">${title}</span>
        <small>${isRunning ? html`<span class="dot"></span>answering` : when(each.changedMs)}</small>
      </button>
      <button ref=${more} type="button" class="quiet more" aria-label=${`More about ${title}`} aria-expanded=${isOpen}
        title="Rename, export, delete" onClick=${() => setOpen(!isOpen)}>⋯</button>
      ${isOpen && html`
        <div class="menu">
          <button type="button" class="quiet" onClick=${() => setDraft(title)}>Rename</button>
          <button type="button" class="quiet" onClick=${save}>Export</button>
          <button type="button" class="quiet" onClick=${() => onRemove([id])}>Delete</button>
        </div>`}
    </li>`;
}

/** @param {string} title */
const fileNameOf = (title) => title.replace(/[^\p{L}\p{N} ._-]+/gu, "").trim().slice(0, 60) || "conversation";
