import assert from "node:assert/strict";
import { test } from "node:test";
import { moduleOf } from "./page.mjs";

const { FileError, readText, withFiles } = await moduleOf("files");

test("a file of UTF-8 or UTF-16 is text", async () => {
  const utf16 = new Uint8Array([0xff, 0xfe, ...Buffer.from("grün", "utf16le")]);
  assert.deepEqual(await readText(new File(["\ufeffgrün"], "a.txt")), { name: "a.txt", text: "grün" });
  assert.deepEqual(await readText(new File([utf16], "b.txt")), { name: "b.txt", text: "grün" });
});

test("a file that is too large or no text is refused by its name", async () => {
  for (const [content, words] of [
    ["x".repeat(1_000_001), /a\.bin is larger than 1 MB/], [new Uint8Array([0xff, 0x00, 0xfe]), /a\.bin is no text/], ["a\0b", /a\.bin is no text/],
  ]) {
    await assert.rejects(readText(new File([content], "a.bin")), (error) => error instanceof FileError && words.test(error.message));
  }
});

test("the model reads each file by its name, in a fence that the file can't close", () => {
  const text = withFiles("What is it?", [{ name: "a.md", text: "```py\nx\n```" }, { name: "b.txt", text: "y\n" }]);
  assert.equal(text, "a.md:\n\n````\n```py\nx\n```\n````\n\nb.txt:\n\n```\ny\n```\n\nWhat is it?");
  assert.equal(withFiles("Nothing"), "Nothing");
});
