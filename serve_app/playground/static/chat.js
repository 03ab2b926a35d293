// The tab "Chat": a conversation with a model that generates.

import { html, useEffect, useReducer, useRef, useState } from "./vendor/preact.js";
import { Attached, readAttached } from "./attached.js";
import { Completion } from "./completion.js";
import { Conversations } from "./conversations.js";
import { DEMO_MODEL, Demo } from "./demo.js";
import { ConversationList } from "./list.js";
import { OptionsForm } from "./options.js";
import { announce } from "./parts.js";
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
    addEventListener("pagehide", leave);
    return () => removeEventListener("pagehide", leave);
  }, []);
  return it.current;
}

/**
 * @param {{models: {id: string, accepts_images: boolean, has_chat_template: boolean}[], onKey: () => void}} props
 */
export function Chat({ models, onKey }) {
  const it = useConversations();
  const end = useRef(null);
  const { isBusy, turns } = it;
  const chosen = models.find(({ id }) => id === it.options.model) ?? models[0];
  useEffect(() => {
    if (chosen && chosen.id !== it.options.model) it.setOptions({ ...it.options, model: chosen.id });
  }, [chosen?.id]);
  useFollowing(end, isBusy);
  const last = turns.at(-1);
  const settings = html`
    <${Settings}>
      <${OptionsForm} options=${it.options} models=${models} onChange=${it.setOptions}
        isChat=${chosen?.has_chat_template !== false} />
    <//>`;
  if (chosen?.has_chat_template === false) {
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
      <section class="talk" aria-label="Conversation">
        ${!turns.length && html`<${Welcome} it=${it} model=${chosen} />`}
        <div class="turns" role="log" aria-live="off" aria-label="Messages">
          ${turns.map((turn) => {
            const versions = html`<${Versions} all=${it.versionsOf(turn)} shown=${turn} onShow=${it.showVersion} />`;
            if (turn.role === "user") {
              return html`<${Question} key=${turn.id} turn=${turn} isBusy=${isBusy} versions=${versions}
                onEdit=${(text) => it.edit(turn, text)} />`;
            }
            if (turn.role === "tool") return html`<${ToolResult} key=${turn.id} turn=${turn} />`;
            const canResume = turn === last && turn.lastEventId && !isBusy
              && (turn.error?.code === "connection_lost" || turn.state === "stopped");
            return html`<${Answer} key=${turn.id} turn=${turn} onKey=${onKey} onChange=${it.onChange}
              versions=${versions} onRetry=${() => it.again(turn)} onResume=${canResume ? () => it.resume(turn) : undefined}
              onResults=${turn === last && !isBusy && turn.calls.length ? () => it.sendResults(turn) : undefined} />`;
          })}
        </div>
        <div ref=${end}></div>
        <${Composer} it=${it} isBusy=${isBusy} takesImages=${Boolean(chosen?.accepts_images)}
          isReady=${Boolean(chosen)} />
      </section>
      ${settings}
    </div>`;
}

/** Scroll with a growing answer while the reader is at its end. */
function useFollowing(end, isBusy) {
  useEffect(() => {
    if (!isBusy) return undefined;
    let frame = 0;
    const follow = () => {
      const distance = end.current?.getBoundingClientRect().top - innerHeight;
      if (distance > -400 && distance < 240) end.current.scrollIntoView({ block: "end" });
      frame = requestAnimationFrame(follow);
    };
    frame = requestAnimationFrame(follow);
    return () => cancelAnimationFrame(frame);
  }, [isBusy]);
}

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

const Welcome = ({ it, model }) => html`
  <div class="welcome">
    <h2>Ask ${model?.id ?? "a model"}</h2>
    <p>Answers stream as they are generated. This page talks to this server only.</p>
    ${model?.id === DEMO_MODEL && html`<${Demo} it=${it} takesImages=${model.accepts_images} />`}
  </div>`;

const NOTHING = { images: /** @type {string[]} */ ([]), files: /** @type {any[]} */ ([]) };

function Composer({ it, isBusy, takesImages, isReady }) {
  const [text, setText] = useState("");
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
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
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
      ${(it.problem || problem) && html`<p class="problem" role="alert">${it.problem || problem}</p>`}
      <${Attached} ...${attached} onRemove=${remove} />
      <label class="field">
        <span class="unseen">Your message</span>
        <textarea rows="2" value=${text} onKeyDown=${onKeyDown} onPaste=${onPaste}
          placeholder=${takesImages ? "Write a message; paste or drop pictures and files" : "Write a message; drop text files"}
          onInput=${(event) => setText(event.target.value)}></textarea>
      </label>
      <div class="row">
        <label class="button quiet">
          <input type="file" class="unseen" multiple
            onChange=${(event) => { add([...event.target.files]); event.target.value = ""; }} />
          Attach
        </label>
        ${it.turns.length > 0 && html`
          <button type="button" class="quiet" onClick=${it.startNew}>New chat</button>`}
        <span class="push"></span>
        ${isBusy
          ? html`<button type="button" class="primary" onClick=${it.stop}>Stop</button>`
          : html`<button class="primary" disabled=${!isReady}>Send</button>`}
      </div>
    </form>`;
}
