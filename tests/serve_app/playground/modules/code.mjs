// Prints requests as code: it reads a JSON list of {kind, body} from standard input.

import { text } from "node:stream/consumers";
import { moduleOf } from "./page.mjs";

const { curl, javascript, python } = await moduleOf("snippets");
const { writeKey } = await moduleOf("api");
writeKey(process.env.KEY ?? "");
const made = JSON.parse(await text(process.stdin));
console.log(JSON.stringify(made.map((each) => ({
  curl: curl(each), Python: python(each), JavaScript: javascript(each),
}))));
