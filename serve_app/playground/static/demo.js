// What the embedded demo model can do, to try with one click. It is tiny: it recites docstrings and names drawn
// shapes, so its schema leaves it the choice among what it would say anyway. It was not trained to call tools: what
// its tool takes is one of three words, so that a call is valid, and the page says that the word is a guess.

import { html } from "./vendor/preact.js";

/** The id of the model that raystream serves by default. */
export const DEMO_MODEL = "pydoc-chat";

const QUESTIONS = ["What does os.path.join do?", "What is textwrap.indent?", "And collections.Counter?"];
const PICTURE_QUESTION = "What is in the picture?";
const COLOURS = { red: "#ff0000", green: "#009600", blue: "#0000ff", purple: "#800080", black: "#000000" };
const SHAPES = ["circle", "square", "triangle", "cross"];
const SIDE = 160;

const PICTURE = {
  type: "object",
  properties: {
    picture: { enum: Object.keys(COLOURS).flatMap((colour) => SHAPES.map((shape) => `A ${colour} ${shape}.`)) },
  },
  required: ["picture"],
  additionalProperties: false,
};

const NOTE_KIND = {
  type: "function",
  function: {
    name: "note_kind",
    description: "Note what a name of the standard library is.",
    parameters: {
      type: "object",
      properties: { kind: { enum: ["function", "class", "module"] } },
      required: ["kind"],
      additionalProperties: false,
    },
  },
};

/** A schema and tools that fit the model. @param {string} model */
export const examplesFor = (model) => (model === DEMO_MODEL
  ? {
      schema: PICTURE,
      tools: [NOTE_KIND],
    }
  : {
      schema: {
        type: "object",
        properties: { kind: { enum: ["question", "request", "complaint"] }, is_urgent: { type: "boolean" } },
        required: ["kind", "is_urgent"],
        additionalProperties: false,
      },
      tools: [{
        type: "function",
        function: {
          name: "look_up",
          description: "Look up a name of the standard library.",
          parameters: {
            type: "object", properties: { name: { type: "string", maxLength: 40 } }, required: ["name"],
          },
        },
      }],
    });

/** @param {string[]} each */
const oneOf = (each) => each[Math.floor(Math.random() * each.length)];

/** Draw one of the shapes that the model knows. @returns {string} A data: URI. */
function drawnShape() {
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: SIDE, height: SIDE });
  const drawing = canvas.getContext("2d");
  drawing.fillStyle = "#f0f0f0";
  drawing.fillRect(0, 0, SIDE, SIDE);
  drawing.fillStyle = COLOURS[oneOf(Object.keys(COLOURS))];
  drawing.beginPath();
  switch (oneOf(SHAPES)) {
    case "circle":
      drawing.arc(80, 80, 52, 0, 2 * Math.PI);
      break;
    case "square":
      drawing.rect(30, 30, 100, 100);
      break;
    case "triangle":
      for (const [x, y] of [[80, 24], [136, 130], [24, 130]]) drawing.lineTo(x, y);
      break;
    default:
      drawing.rect(62, 24, 36, 112);
      drawing.rect(24, 62, 112, 36);
  }
  drawing.fill();
  return canvas.toDataURL("image/png");
}

const asJson = (value) => JSON.stringify(value, null, 2);

/**
 * @param {{it: import("./conversations.js").Conversations, takesImages: boolean, onAsked: () => void}} props
 */
export function Demo({ it, takesImages, onAsked }) {
  const { schema, tools } = examplesFor(DEMO_MODEL);
  const show = (options, question, images) => {
    it.setOptions({ ...it.options, schema: "", tools: "", tool_choice: "auto", ...options });
    it.ask(question, images);
    onAsked();
  };
  const chip = (name, onClick) => html`<button type="button" class="chip" onClick=${onClick}>${name}</button>`;
  return html`
    <p class="badge"><strong>Demo model</strong> A tiny model that knows Python's docstrings${takesImages
      && " and plain drawn shapes"}, and nothing else. It is there to try the server; serve another model to talk to.</p>
    <p class="row">${QUESTIONS.map((each) => chip(each, () => show({}, each)))}</p>
    <p class="row">
      ${takesImages && html`
        ${chip("Name a drawn shape", () => show({}, PICTURE_QUESTION, [drawnShape()]))}
        ${chip("Answer by a JSON schema", () => show({ schema: asJson(schema) }, PICTURE_QUESTION, [drawnShape()]))}`}
      ${chip("Call a tool", () => show({ tools: asJson(tools), tool_choice: "required" }, QUESTIONS[0]))}
    </p>
    <p class="detail">The call of the tool always fits its schema, but this model guesses the argument.</p>`;
}
