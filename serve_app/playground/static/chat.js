// The tab "Chat": a conversation with a model that generates.

import { html, useEffect, useReducer, useRef, useState } from "./vendor/preact.js";
import { Attached, readAttached } from "./attached.js";
import { Completion } from "./completion.js";
import { Conversations } from "./conversations.js";
import { DEMO_MODEL, Demo } from "./demo.js";
import { useFollowing } from "./following.js";
import { Icon } from "./icons.js";
import { ConversationList } from "./list.js";
import { OptionsForm } from "./options.js";
import { announce } from "./parts.js";
import { press } from "./shortcuts.js";
import { browserStorage } from "./storage.js";
import { TextBox, focusBox, isSent } from "./textbox.js";
import { Answer, Question, ToolResult } from "./turn.js";
import { Versions } from "./versions.js";

/** @returns {Conversations} */
function useConversations() {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const it = useRef(/** @type {Conversations | null} */ (null));
  it.current ??= new Conversations(redraw, announce);
  useEffect(() => {
    it.current.load();
    const leave = () => it.current.leave();
    const comeBack = ({ persisted }) => persisted && it.current.load();
    addEventListener("pagehide", leave);
    addEventListener("pageshow", comeBack);
    return () => {
      removeEventListener("pagehide", leave);
      removeEventListener("pageshow", comeBack);
    };
  }, []);
  return it.current;
}

/**
 * @param {{models: import("./models.js").Model[], onModels: () => void, onKey: () => void}} props
 */
export function Chat({ models, onModels, onKey }) {
  const it = useConversations();
  const box = useRef(null);
  const { isBusy, turns } = it;
  const chosen = models.find(({ id }) => id === it.options.model) ?? models[0];
  const isBase = chosen?.has_chat_template === false;
  useEffect(() => {
    if (chosen && chosen.id !== it.options.model) it.setOptions({ ...it.options, model: chosen.id });
  }, [chosen?.id, it.options.model]);
  const last = turns.at(-1);
  const { talk, end, isAway, toEnd } = useFollowing(isBusy, last, !isBase || turns.length > 0);
  // What was pressed may be gone; the next thing to do is to write.
  const thenWrite = (act) => (...given) => {
    const isDone = act(...given) !== false;
    if (isDone) focusBox(box.current, talk.current);
    return isDone;
  };
  useEffect(() => {
    if (document.activeElement === document.body) focusBox(box.current);
  }, []);
  useEffect(() => {
    if (chosen && chosen.state !== "running") onModels(); // a question wakes it
  }, [isBusy]);
  const settings = html`
    <${Settings}>
      <${OptionsForm} options=${it.options} models=${models} onChange=${it.setOptions} onModels=${onModels}
        isChat=${!isBase} />
    <//>`;
  if (isBase && !turns.length) {
    return html`
      <div class="chat">
        <${ConversationList} it=${it} />
        <${Completion} key=${chosen.id} model=${chosen} options=${it.options} onKey=${onKey} />
        ${settings}
      </div>`;
  }
  return html`
    <div class="chat">
      <${ConversationList} it=${it} />
      <section class="talk" ref=${talk} tabindex="-1" aria-label="Conversation">
        ${!turns.length && html`
          <${Welcome} it=${it} model=${chosen} onAsked=${thenWrite(() => true)} />`}
        <div class="turns" role="log" aria-live="off" aria-label="Messages">
          ${turns.map((turn) => {
            // A turn's versions take each other's place, and the switch that was pressed keeps the focus.
            const key = `${it.current.id} ${turn.parent}`;
            const versions = html`<${Versions} all=${it.versionsOf(turn)} shown=${turn} onShow=${it.showVersion} />`;
            if (turn.role === "user") {
              return html`<${Question} key=${key} turn=${turn} isBusy=${isBusy} versions=${versions}
                onEdit=${isBase ? undefined : thenWrite((text) => it.edit(turn, text))} />`;
            }
            if (turn.role === "tool") return html`<${ToolResult} key=${key} turn=${turn} />`;
            const canResume = turn === last && turn.lastEventId && !isBusy && !isBase
              && (turn.error?.code === "connection_lost" || turn.state === "stopped");
            return html`<${Answer} key=${key} turn=${turn} onKey=${onKey} onChange=${it.onChange}
              versions=${versions} onRetry=${isBase ? undefined : thenWrite(() => it.again(turn))}
              onResume=${canResume ? thenWrite(() => void it.resume(turn)) : undefined}
              onResults=${turn === last && !isBusy && !isBase && turn.calls.length
                ? thenWrite(() => it.sendResults(turn)) : undefined} />`;
          })}
        </div>
        ${isBase
          ? html`<${ReadOnly} it=${it} model=${chosen} />`
          : html`<${Composer} it=${it} isBusy=${isBusy} takesImages=${Boolean(chosen?.accepts_images)}
              isReady=${Boolean(chosen)} box=${box} onClear=${thenWrite(it.startNew)}
              onEnd=${isAway && last ? toEnd : undefined} />`}
        <div ref=${end}></div>
      </section>
      ${settings}
    </div>`;
}

/** Stands in place of the text box while the chosen model can't chat. */
const ReadOnly = ({ it, model }) => html`
  <div class="composer">
    <p class="detail">${model.id} is a base model: it answers no questions, so this conversation can only be read.</p>
    <p class="row">
      <button type="button" class="quiet" aria-keyshortcuts="n" onClick=${it.startNew}>Go on with a text</button>
      ${it.isBusy && html`
        <button type="button" class="primary" aria-keyshortcuts="Escape" onClick=${it.stop}>
          <${Icon} name="stop" />Stop</button>`}
    </p>
  </div>`;

const WIDE = matchMedia("(min-width: 60rem)");

function Settings({ children }) {
  const [isWide, setWide] = useState(WIDE.matches);
  useEffect(() => {
    const note = () => setWide(WIDE.matches);
    WIDE.addEventListener("change", note);
    return () => WIDE.removeEventListener("change", note);
  }, []);
  return html`
    <aside class="settings" aria-label="Settings">
      <details open=${isWide}>
        <summary>Settings</summary>
        ${children}
      </details>
    </aside>`;
}

/** What a reader may expect of a model that is not ready. */
const EXPECTED = {
  asleep: "It sleeps because nobody has used it. A question wakes it, and is answered once it is loaded.",
  scaling: "It is waking. A question waits until it is loaded.",
  down: "It is loading. A question waits until it is loaded.",
  failed: "It could not be started, so it answers nothing:",
};

const Welcome = ({ it, model, onAsked }) => html`
  <div class="welcome">
    <h2>Ask ${model?.id ?? "a model"}</h2>
    <p>Answers stream as they are generated. This page talks to this server only.</p>
    ${model && EXPECTED[model.state] && html`
      <p class="waiting"><span class="dot"></span>${EXPECTED[model.state]} ${model.failure}</p>`}
    ${model?.id === DEMO_MODEL && html`<${Demo} it=${it} takesImages=${model.accepts_images} onAsked=${onAsked} />`}
  </div>`;

/** The text that was not sent when the page was left. The next page has it, and only that one. */
const UNSENT = "raystream-unsent";

function useUnsent() {
  const state = useState(() => browserStorage.read(UNSENT));
  const text = useRef("");
  [text.current] = state;
  useEffect(() => {
    const take = () => browserStorage.write(UNSENT, "");
    const leave = () => text.current && browserStorage.write(UNSENT, text.current);
    take();
    addEventListener("pagehide", leave);
    addEventListener("pageshow", take);
    return () => {
      removeEventListener("pagehide", leave);
      removeEventListener("pageshow", take);
    };
  }, []);
  return state;
}

const NOTHING = { images: /** @type {string[]} */ ([]), files: /** @type {any[]} */ ([]) };

function Composer({ it, isBusy, takesImages, isReady, box, onClear, onEnd }) {
  const [text, setText] = useUnsent();
  const [attached, setAttached] = useState(NOTHING);
  const [problem, setProblem] = useState("");
  const add = async (given) => {
    const { images, files, problem: found } = await readAttached(given, takesImages);
    setProblem(found);
    setAttached((before) => ({ images: [...before.images, ...images], files: [...before.files, ...files] }));
  };
  const remove = (kind, index) =>
    setAttached((before) => ({ ...before, [kind]: before[kind].toSpliced(index, 1) }));
  const send = (event) => {
    event?.preventDefault();
    if (isBusy || !isReady || !(text.trim() || attached.images.length || attached.files.length)) return;
    if (!it.ask(text.trim(), attached.images, attached.files)) return;
    setText("");
    setAttached(NOTHING);
  };
  const onKeyDown = (event) => {
    if (isSent(event)) send(event);
    if (event.key === "ArrowUp" && !text && press("e")) event.preventDefault();
  };
  const onPaste = (event) => {
    const files = [...event.clipboardData.files];
    if (files.length) {
      event.preventDefault();
      add(files);
    }
  };
  // Text that is dropped is the browser's matter.
  const onDragOver = (event) => {
    if (event.dataTransfer.types.includes("Files")) event.preventDefault();
  };
  const onDrop = (event) => {
    const files = [...event.dataTransfer.files];
    if (!files.length) return;
    event.preventDefault();
    add(files);
  };
  return html`
    <form class="composer" onSubmit=${send} onDragOver=${onDragOver} onDrop=${onDrop}>
      ${onEnd && html`
        <button type="button" class="to-end" onClick=${onEnd}><${Icon} name="down" />To the end</button>`}
      ${(it.problem || problem) && html`<p class="problem" role="alert">${it.problem || problem}</p>`}
      <${Attached} ...${attached} onRemove=${remove} />
      <label class="field">
        <span class="unseen">Your message</span>
        <${TextBox} text=${text} box=${box} aria-keyshortcuts="/" onKeyDown=${onKeyDown} onPaste=${onPaste}
          placeholder=${takesImages ? "Write a message; paste or drop pictures and files" : "Write a message; drop text files"}
          onInput=${(event) => setText(event.target.value)} />
      </label>
      <div class="row">
        <label class="button quiet">
          <input type="file" class="unseen" multiple
            onChange=${(event) => { add([...event.target.files]); event.target.value = ""; }} />
          <${Icon} name="picture" />Attach
        </label>
        ${it.turns.length > 0 && html`
          <button type="button" class="quiet" aria-keyshortcuts="n" onClick=${onClear}>
            <${Icon} name="plus" />New chat</button>`}
        <span class="push"></span>
        ${isBusy
          ? html`<button type="button" class="primary" aria-keyshortcuts="Escape"
              onClick=${it.stop}><${Icon} name="stop" />Stop</button>`
          : html`<button class="primary" disabled=${!isReady}><${Icon} name="send" />Send</button>`}
      </div>
    </form>`;
}
