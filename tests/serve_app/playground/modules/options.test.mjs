import assert from "node:assert/strict";
import { test } from "node:test";
import { moduleOf } from "./page.mjs";

const { DEFAULTS, OptionError, differences, fieldsOf } = await moduleOf("options");
const given = (fields) => fieldsOf({ ...DEFAULTS, model: "m", ...fields });

test("an empty form asks for the model only", () => {
  assert.deepEqual(given({}), { model: "m" });
});

test("numbers are numbers, and stops are lines", () => {
  assert.deepEqual(given({ temperature: " 0.5 ", top_k: "-1", seed: "0", stop: "END\n\nFIN", priority: "-3" }), {
    model: "m", temperature: 0.5, top_k: -1, seed: 0, stop: ["END", "FIN"], priority: -3,
  });
});

test("a schema is enforced, and tools come with the choice", () => {
  const found = given({ schema: '{"type": "object"}', tools: "[1]", tool_choice: "required" });
  assert.deepEqual(found.response_format.json_schema, {
    name: "answer", schema: { type: "object" }, strict: true,
  });
  assert.deepEqual([found.tools, found.tool_choice], [[1], "required"]);
});

test("a mistake names its field", () => {
  for (const [fields, message] of [
    [{ temperature: "hot" }, /^Temperature is no number\.$/],
    [{ schema: "{" }, /^The JSON schema is no JSON: /],
    [{ tools: "nothing" }, /^The list of tools is no JSON: /],
  ]) {
    assert.throws(() => given(fields), (error) => error instanceof OptionError && message.test(error.message));
  }
});

test("what differs from the default is told in a line", () => {
  assert.equal(differences({ ...DEFAULTS, model: "m", top_p: " " }), "");
  const given = { ...DEFAULTS, model: "m", temperature: "1.5", seed: "7", system: "Be brief.", tools: "[]", priority: "5" };
  assert.equal(differences(given), "temperature 1.5, seed 7, priority 5, a system prompt, tools");
});
