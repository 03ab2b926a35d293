// The request that was just made, as code to copy: for curl, Python and JavaScript.
//
// No key is ever written into code: it comes from the environment.

import { SERVER, readKey } from "./api.js";

const KEY_VARIABLE = "RAYSTREAM_API_KEY";

/** What OpenAI's Python client has as arguments; the others go into `extra_body`. */
const OPENAI_FIELDS = new Set([
  "model", "messages", "prompt", "stream", "temperature", "top_p", "max_tokens", "seed", "stop", "presence_penalty",
  "frequency_penalty", "response_format", "tools", "tool_choice", "input", "encoding_format",
]);

/**
 * @typedef {"chat" | "completion" | "embeddings" | "classify"} Kind
 * @typedef {{kind: Kind, body: Record<string, any>}} Made
 */

const PATHS = {
  chat: "v1/chat/completions", completion: "v1/completions", embeddings: "v1/embeddings", classify: "v1/classify",
};
const METHODS = { chat: "chat.completions", completion: "completions", embeddings: "embeddings" };

/**
 * The body comes by standard input: a picture is longer than an argument may be (128 KiB on Linux). No line of
 * JSON reads EOF.
 * @param {Made} made
 */
export function curl({ kind, body }) {
  const key = readKey() ? `  -H "Authorization: Bearer $${KEY_VARIABLE}" \\\n` : "";
  const options = body.stream ? "-N " : "";
  return (
    `curl ${options}${SERVER}/${PATHS[kind]} \\\n${key}  -H 'Content-Type: application/json' \\\n` +
    `  --data-binary @- <<'EOF'\n${JSON.stringify(body, null, 2)}\nEOF\n`
  );
}

/** @param {Made} made */
export function python({ kind, body }) {
  const client = [
    ...(readKey() ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${SERVER}/v1", api_key=${readKey() ? `os.environ["${KEY_VARIABLE}"]` : '"none"'})`,
  ];
  if (kind === "classify") {
    return lines(
      ...client,
      `answer = client.post("/classify", cast_to=object, body=${pythonValue(body, 0)})`,
      "print(answer)",
    );
  }
  const method = METHODS[kind];
  const call = [`${body.stream ? "stream" : "answer"} = client.${method}.create(`, ...pythonArguments(body), ")"];
  if (kind === "embeddings") {
    return lines(...client, ...call, "print(len(answer.data), len(answer.data[0].embedding))");
  }
  if (kind === "completion") {
    return lines(...client, ...call, "for chunk in stream:", '    print(chunk.choices[0].text, end="", flush=True)');
  }
  return lines(
    ...client,
    ...call,
    "for chunk in stream:",
    "    delta = chunk.choices[0].delta",
    '    print(delta.content or delta.tool_calls or "", end="", flush=True)',
  );
}

/** @param {Record<string, any>} body */
function pythonArguments(body) {
  const known = Object.entries(body).filter(([name]) => OPENAI_FIELDS.has(name));
  const others = Object.entries(body).filter(([name]) => !OPENAI_FIELDS.has(name));
  return [
    ...known.map(([name, value]) => `    ${name}=${pythonValue(value, 1)},`),
    ...(others.length ? [`    extra_body=${pythonValue(Object.fromEntries(others), 1)},`] : []),
  ];
}

/** @param {Made} made */
export function javascript({ kind, body }) {
  const given = JSON.stringify(body, null, 2);
  if (kind === "classify") {
    const key = readKey() ? `\n    Authorization: \`Bearer \${process.env.${KEY_VARIABLE}}\`,` : "";
    return lines(
      `const answer = await fetch("${SERVER}/${PATHS[kind]}", {`,
      '  method: "POST",',
      `  headers: {\n    "Content-Type": "application/json",${key}\n  },`,
      `  body: JSON.stringify(${indented(given)}),`,
      "});",
      "console.log(JSON.stringify(await answer.json(), null, 2));",
    );
  }
  const method = METHODS[kind];
  return lines(
    'import OpenAI from "openai";',
    "",
    "const client = new OpenAI({",
    `  baseURL: "${SERVER}/v1",`,
    `  apiKey: ${readKey() ? `process.env.${KEY_VARIABLE}` : '"none"'},`,
    "});",
    `const ${body.stream ? "stream" : "answer"} = await client.${method}.create(${given});`,
    ...(kind === "embeddings"
      ? ["console.log(answer.data.length, answer.data[0].embedding.length);"]
      : [
          "for await (const chunk of stream) {",
          ...(kind === "completion"
            ? ["  process.stdout.write(chunk.choices[0].text);"]
            : [
                "  const { content, tool_calls: calls } = chunk.choices[0].delta;",
                '  process.stdout.write(content ?? (calls ? JSON.stringify(calls) : ""));',
              ]),
          "}",
        ]),
  );
}

const lines = (...each) => `${each.join("\n")}\n`;

/** @param {string} text */
const indented = (text) => text.replaceAll("\n", "\n  ");

/**
 * Return a value as Python writes it.
 * @param {any} value What JSON can hold.
 * @param {number} depth
 */
function pythonValue(value, depth) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const entries = isList
    ? value.map((each) => pythonValue(each, depth + 1))
    : Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${pythonValue(each, depth + 1)}`);
  if (!entries.length) return isList ? "[]" : "{}";
  const [open, close] = isList ? "[]" : "{}";
  const margin = "    ".repeat(depth);
  return `${open}\n${entries.map((each) => `${margin}    ${each},\n`).join("")}${margin}${close}`;
}

const LONGEST_SHOWN = 60;

/**
 * Return code for the eye: pictures are cut short; the code that is copied holds them whole.
 * @param {string} code
 */
export const abridged = (code) =>
  code.replace(/(data:image\/[a-z]+;base64,[\w+/=]{40})[\w+/=]+/g, (whole, start) =>
    whole.length > LONGEST_SHOWN ? `${start}…` : whole);
