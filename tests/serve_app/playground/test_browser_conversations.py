"""The conversations that the browser keeps: list, search, names, undo, branches, files."""

import asyncio
import json
from pathlib import Path

from playwright.async_api import Locator, expect

from deployments.contract.output import FinishReason, TextDelta
from tests.serve_app.fakes import HELLO
from tests.serve_app.playground.served_page import Page


def listed(page: Page) -> Locator:
    """Return the conversations of the list."""
    return page.page.get_by_role("navigation", name="Conversations").locator(".conversations li")


async def more(page: Page, title: str, action: str) -> None:
    """Do something with a conversation of the list."""
    await page.page.get_by_label(f"More about {title}", exact=True).click()
    await listed(page).filter(has_text=title).get_by_role("button", name=action).click()


async def test_conversations_are_kept_found_renamed_and_deleted_with_undo(page: Page) -> None:
    await page.open()
    for question in ("What is a path?", "How do I count?"):
        await page.ask_anew(question)
    await expect(listed(page)).to_have_count(2)
    await page.page.reload()
    await page.says("Hello, world!")
    await expect(listed(page).locator("[aria-current]")).to_contain_text("How do I count?")
    await page.page.get_by_label("Search the conversations").fill("PATH what")
    await expect(listed(page)).to_have_count(1)
    await page.page.get_by_label("Search the conversations").fill("")
    await more(page, "What is a path?", "Rename")
    await page.page.get_by_label("Name of the conversation").fill("Files")
    await page.page.keyboard.press("Enter")
    await more(page, "Files", "Delete")
    await expect(listed(page)).to_have_count(1)
    await expect(page.button("Undo")).to_be_focused()
    await page.page.keyboard.press("Enter")
    await expect(listed(page)).to_have_count(2)
    await page.button("Files", exact=False).first.click()
    await expect(page.page.locator(".asked")).to_have_text("What is a path?")


async def test_nothing_is_lost_by_a_new_chat_or_a_closed_tab_while_an_answer_streams(
    page: Page,
) -> None:
    held = asyncio.Event()
    page.models.chat.scripts = [
        [[TextDelta((1,), "Half an")], asyncio.Event()],
        HELLO,
        [[TextDelta((1,), "Three quarters")], held, [TextDelta((2,), ".", FinishReason.STOP)]],
    ]
    await page.open()
    await page.ask("More?")
    await page.says("Half an")
    # The tab is gone; its server notices, and another tab finds what had come.
    other = await page.page.context.new_page()
    await page.page.close()
    await asyncio.wait_for(page.models.chat.streams[0].closed.wait(), 30)
    page.page = other
    await page.open()
    await page.button("More?", exact=False).first.click()
    await page.says("Half an")
    await expect(page.answer).to_contain_text("Stopped here")
    await expect(page.button("Go on")).to_be_visible()
    await page.ask_anew("Short?")
    # An answer goes on behind a new chat.
    await page.button("New chat").click()
    await page.ask("Long?")
    await page.says("Three quarters")
    await page.button("New chat").click()
    await expect(listed(page).first).to_contain_text("answering")
    held.set()
    await expect(listed(page).first).not_to_contain_text("answering")
    await page.button("Long?", exact=False).first.click()
    await page.says("Three quarters.")
    await expect(page.answer).not_to_contain_text("Stopped here")


async def test_a_message_that_was_not_sent_is_in_the_next_page_only(page: Page) -> None:
    await page.open()
    await page.page.get_by_label("Your message").fill("Half a quest")
    await page.page.reload()
    await expect(page.page.get_by_label("Your message")).to_have_value("Half a quest")
    other = await page.page.context.new_page()
    await page.page.close(run_before_unload=True)
    page.page = other
    await page.open()
    await expect(page.page.get_by_label("Your message")).to_have_value("Half a quest")
    page.page = await page.page.context.new_page()
    await page.open()
    await expect(page.page.get_by_label("Your message")).to_have_value("")


async def test_an_edit_and_a_repeat_keep_the_other_versions(page: Page) -> None:
    page.models.chat.scripts = [
        [[TextDelta((1,), text, FinishReason.STOP)]] for text in ("One.", "Two.", "Three.")
    ]
    await page.open()
    await page.ask("First")
    await page.is_done()
    await page.button("Answer again").click()
    await page.says("Two.")
    await page.button("Previous version").click()
    await page.says("One.")
    await expect(page.button("Previous version")).to_be_focused()
    await expect(page.answer.get_by_role("group", name="Versions")).to_contain_text("1 of 2")
    await page.button("Edit").click()
    await page.page.get_by_label("Edit the question").fill("Second")
    await page.button("Ask again").click()
    await page.says("Three.")
    await page.button("Previous version").click()
    await expect(page.page.locator(".asked")).to_have_text("First")
    await expect(page.button("Previous version").first).to_be_focused()
    # The switches stay where they are in another tab.
    await page.page.reload()
    await expect(page.page.locator(".asked")).to_have_text("First")
    await expect(page.page.get_by_role("group", name="Versions")).to_have_count(2)


async def test_conversations_travel_in_a_file(page: Page, tmp_path: Path) -> None:
    await page.open()
    await page.ask_anew("Take me along")
    async with page.page.expect_download() as downloading:
        await page.button("Export all").click()
    file = tmp_path / "conversations.json"
    await (await downloading.value).save_as(file)
    assert json.loads(file.read_text())["conversations"][0]["turns"][0]["text"] == "Take me along"
    await more(page, "Take me along", "Delete")
    await expect(listed(page)).to_have_count(0)
    chooser = page.page.locator(".history input[type=file]")
    await chooser.set_input_files(
        {"name": "x.json", "mimeType": "application/json", "buffer": b"{"}
    )
    await expect(page.page.get_by_role("alert")).to_contain_text("no JSON")
    # Its model is served no more.
    file.write_text(file.read_text().replace('"model": "m"', '"model": "gone"'))
    await chooser.set_input_files(file)
    told = page.page.locator(".history").get_by_text("1 conversation imported.")
    await expect(told).to_be_visible()
    await page.button("Take me along", exact=False).first.click()
    await expect(told).to_have_count(0)
    await page.says("Hello, world!")
    # The same turns in another conversation are turns of that one too; ours keeps its own.
    copy = json.loads(file.read_text())
    copy["conversations"][0] |= {"id": "other", "title": "Another"}
    await chooser.set_input_files(
        {"name": "x.json", "mimeType": "application/json", "buffer": json.dumps(copy).encode()}
    )
    await page.button("Another", exact=False).first.click()
    await page.says("Hello, world!")
    await page.button("Take me along", exact=False).first.click()
    await page.says("Hello, world!")
    await expect(page.page.get_by_role("combobox", name="Model")).to_have_value("m")
    await page.ask("And now?")
    await expect(page.page.get_by_role("article", name="Answer")).to_have_count(2)
    await page.is_done()
    await page.says("Hello, world!")


async def test_escape_in_the_list_leaves_an_answer_alone(page: Page) -> None:
    more_comes = asyncio.Event()
    end = [TextDelta((2,), " end.", FinishReason.STOP)]
    page.models.chat.steps = [[TextDelta((1,), "An")], more_comes, end]
    await page.open()
    await page.ask("Long?")
    await page.says("An")
    keys = page.page.keyboard
    await more(page, "Long?", "Rename")
    await expect(page.page.get_by_label("Name of the conversation")).to_be_focused()
    await keys.press("Escape")
    opener = page.page.get_by_label("More about Long?", exact=True)
    await expect(opener).to_be_focused()
    await keys.press("Enter")
    await expect(page.button("Rename")).to_be_visible()
    await keys.press("Escape")
    await expect(page.button("Rename")).to_have_count(0)
    await expect(opener).to_be_focused()
    await page.page.get_by_label("Search the conversations").focus()
    await keys.press("Escape")
    await expect(page.page.get_by_label("Search the conversations")).not_to_be_focused()
    more_comes.set()
    await page.says("An end.")


STORED_BEFORE = """() => new Promise((done, fail) => {
  indexedDB.deleteDatabase("raystream");
  const request = indexedDB.open("raystream", 1);
  request.onerror = () => fail(request.error);
  request.onupgradeneeded = () => {
    const database = request.result;
    database.createObjectStore("conversations", { keyPath: "id" }).put({
      id: "c", title: "", shownTitle: "Kept?", createdMs: 1, changedMs: 1, head: "a", options: {},
    });
    const turns = database.createObjectStore("turns", { keyPath: "id" });
    turns.createIndex("conversation", "conversation");
    const turn = {
      conversation: "c", images: [], files: [], reasoning: "", calls: [], callId: "", marks: [],
      waiting: "", state: "complete", error: null, usage: null, finish: "", body: null, system: "",
      timing: { sentMs: 0, firstMs: 0, lastMs: 0, firstTokens: 0 }, model: "m",
    };
    turns.put({ ...turn, id: "q", parent: "", role: "user", text: "Kept?", order: 0 });
    turns.put({ ...turn, id: "a", parent: "q", role: "assistant", text: "Kept.", order: 1 });
  };
  request.onsuccess = () => done(request.result.close());
})"""


async def test_what_an_earlier_page_has_stored_is_there(page: Page) -> None:
    await page.open()
    await page.page.evaluate(STORED_BEFORE)
    await page.page.reload()
    page.tab.complaints.clear()  # the page before may have been reading what was deleted
    await page.button("Kept?", exact=False).first.click()
    await page.says("Kept.")


async def test_two_tabs_go_on_with_one_conversation_and_one_deletes_it(page: Page) -> None:
    page.models.chat.scripts = [
        [[TextDelta((1,), text, FinishReason.STOP)]] for text in ("One.", "Two.")
    ]
    await page.open()
    await page.ask_anew("First")
    one = page.page
    page.page = other = await one.context.new_page()
    await page.open()
    await page.button("First", exact=False).first.click()
    await page.ask("Second")
    await page.says("Two.")
    await page.is_done()
    await more(page, "First", "Rename")
    await page.page.get_by_label("Name of the conversation").fill("Renamed")
    await page.page.keyboard.press("Enter")
    page.page = one
    await expect(listed(page)).to_contain_text("Renamed")
    await page.page.get_by_label("Temperature").fill("0.5")
    await page.page.reload()
    await page.says("Two.")
    await expect(listed(page)).to_contain_text("Renamed")
    page.page = other
    await more(page, "Renamed", "Delete")
    page.page = one
    await expect(page.page.get_by_role("alert")).to_contain_text("deleted in another browser tab")
    await expect(listed(page)).to_have_count(0)
    await other.get_by_role("button", name="Undo").click()
    await page.button("Renamed", exact=False).first.click()
    await page.says("Two.")
