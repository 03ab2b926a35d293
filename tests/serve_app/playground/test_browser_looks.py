"""The page for everyone: narrow and wide, light and dark, by keyboard, by screen reader."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.async_api import Browser, expect

from tests.browser import tab_of
from tests.node_packages import install
from tests.serve_app.playground.node_program import PACKAGES
from tests.serve_app.playground.served_page import Models, Page, serving

TABS = ("Chat", "Compare", "Classify", "Search", "Live")
Scheme = Literal["light", "dark"]


@pytest.fixture(scope="module")
async def axe() -> str:
    """Return axe's rules as a script."""
    await asyncio.to_thread(install, PACKAGES)
    return (PACKAGES / "node_modules/axe-core/axe.min.js").read_text("utf-8")


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(folder=tmp_path / "jobs")


@pytest.fixture
async def url(models: Models, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    async with serving(models, monkeypatch) as url:
        yield url


async def fill(page: Page, tab: str) -> None:
    """Show a tab with what its user gets there."""
    await page.show(tab)
    match tab:
        case "Chat":
            await page.ask("Hello?")
            await page.is_done()
            await page.page.get_by_text("Copy as code").first.click()
            chat = page.page.get_by_role("tabpanel", name="Chat")
            if await chat.locator("summary", has_text="Settings").is_visible():
                await chat.locator("summary", has_text="Settings").click()
            await chat.locator("summary", has_text="Tools").click()
        case "Compare":
            if await page.button("New comparison").is_visible():
                await page.button("New comparison").click()
            await page.page.get_by_label("Your question to both").fill("Hello?")
            await page.button("Ask both").click()
            answers = page.page.get_by_role("article", name="Answer").locator("visible=true")
            await expect(answers.and_(page.page.locator("[aria-busy=false]"))).to_have_count(2)
        case "Classify":
            await page.button("Classify").click()
            await page.page.get_by_text("Scores of each piece").click()
        case "Search":
            await page.search("abc")
        case "Live":
            await page.page.get_by_role("img", name="Memory of m").wait_for()
            if not await page.page.get_by_role("progressbar").count():
                await page.run_batch("Hello?")
            await page.page.get_by_role("progressbar").first.wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_no_violation_on_any_tab(
    browser: Browser, url: str, axe: str, scheme: Scheme
) -> None:
    async with tab_of(browser, color_scheme=scheme) as tab:
        page = Page(tab, url)
        await page.open()
        await tab.evaluate(axe)
        for name in TABS:
            await fill(page, name)
            found: dict[str, Any] = await tab.evaluate(
                "axe.run({resultTypes: ['violations', 'passes']})"
            )
            told = [
                (each["id"], each["help"], [node["html"] for node in each["nodes"]])
                for each in found["violations"]
            ]
            assert told == [], f"{name}: {json.dumps(told, indent=1)}"
            assert len(found["passes"]) > 20
        await page.button("Key").click()
        found = await tab.evaluate("axe.run()")
        assert [each["id"] for each in found["violations"]] == []
        page.check_quiet()


@pytest.mark.parametrize("width", [320, 768, 1920])
async def test_no_tab_scrolls_sideways(browser: Browser, url: str, width: int) -> None:
    async with tab_of(browser, width=width) as tab:
        page = Page(tab, url)
        await page.open()
        for name in TABS:
            await fill(page, name)
            assert not await page.is_wider_than_the_window(), name
        page.check_quiet()


async def test_dark_follows_the_system_and_the_button_decides(browser: Browser, url: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    async with tab_of(browser, color_scheme="dark") as tab:
        page = Page(tab, url)
        await page.open()
        dark = await tab.evaluate(ground)
        toggle = page.page.get_by_role("button", name="Colours:")
        await toggle.click()
        await expect(toggle).to_have_text("Colours: Light")
        light = await tab.evaluate(ground)
        await page.page.emulate_media(color_scheme="light")
        await toggle.click()
        await expect(toggle).to_have_text("Colours: Dark")
        assert await tab.evaluate(ground) == dark != light
        await page.page.reload()
        await expect(toggle).to_have_text("Colours: Dark")
        assert await tab.evaluate(ground) == dark
        await toggle.click()
        await expect(toggle).to_have_text("Colours: System")
        assert await tab.evaluate(ground) == light


async def test_everything_can_be_done_by_keyboard(
    browser: Browser, models: Models, url: str
) -> None:
    async with tab_of(browser) as tab:
        page = Page(tab, url)
        await page.open("classify")
        keys = tab.page.keyboard
        await keys.press("Tab")
        await expect(tab.page.get_by_text("Skip to the content")).to_be_focused()
        await expect(tab.page.get_by_text("Skip to the content")).to_be_in_viewport()
        await keys.press("Enter")
        await reach(page, "Characters of a piece")
        await tab.page.goto("about:blank")
        await page.open()
        await expect(tab.page.get_by_label("Your message")).to_be_focused()
        await keys.type("Hello?")
        await keys.press("Enter")
        await page.is_done()
        await expect(page.answer).to_contain_text("Hello, world!")
        for name in ("Edit", "Answer again", "Attach", "Temperature"):
            await tab.page.reload()
            await page.answer.wait_for()
            await reach(page, name)
        await tab.page.get_by_role("tab", name="Chat").focus()
        for name in TABS[1:]:
            await keys.press("ArrowRight")
            await expect(tab.page.get_by_role("tab", name=name)).to_be_focused()
            await expect(tab.page.get_by_role("tabpanel", name=name)).to_be_visible()
        await keys.press("Home")
        await expect(tab.page.get_by_role("tabpanel", name="Chat")).to_be_visible()
        await reach(page, "Key")
        await keys.press("Enter")
        await expect(tab.page.get_by_label("API key")).to_be_focused()
        await keys.press("Escape")
        await expect(tab.page.get_by_role("button", name="Key")).to_be_focused()


async def test_the_focus_stays_where_one_goes_on(page: Page) -> None:
    await page.open()
    box = page.page.get_by_label("Your message")
    await page.ask("First")
    await page.is_done()
    await page.button("Edit").click()
    edited = page.page.get_by_label("Edit the question")
    await expect(edited).to_be_focused()
    await page.page.keyboard.press("Escape")
    await expect(edited).to_have_count(0)
    await expect(page.button("Edit")).to_be_focused()
    await page.page.keyboard.press("Enter")
    await page.page.keyboard.type(" and last")
    await page.page.keyboard.press("Control+Enter")
    await expect(page.page.locator(".asked")).to_have_text("First and last")
    await expect(box).to_be_focused()
    await page.is_done()
    await page.button("Edit").click()
    await page.page.keyboard.press("Shift+Enter")
    await page.page.keyboard.type("one")
    await page.page.keyboard.press("Enter")  # as in the text box
    await expect(page.page.locator(".asked")).to_have_text("First and last\none")
    await page.is_done()
    for name in ("Answer again", "New chat"):
        await page.button(name).click()
        await expect(box).to_be_focused()


async def test_shortcuts_are_listed_and_act_outside_of_text_boxes(page: Page) -> None:
    await page.open()
    keys = page.page.keyboard
    await expect(page.page.get_by_label("Your message")).to_be_focused()
    await keys.type("n?")
    await expect(page.page.get_by_label("Your message")).to_have_value("n?")
    await keys.press("Enter")
    await page.is_done()
    await expect(page.button("Send")).to_be_visible()  # until then the keys are for the answer
    await keys.press("ArrowUp")
    await expect(page.page.get_by_label("Edit the question")).to_be_focused()
    await keys.press("Escape")
    await keys.press("r")
    await expect(page.answer).to_contain_text("2 of 2")
    await page.is_done()
    await expect(page.button("Send")).to_be_visible()
    assert len(page.models.chat.requests) == 2
    await expect(page.page.get_by_label("Your message")).to_be_focused()
    await keys.press("Escape")
    await expect(page.page.get_by_label("Your message")).not_to_be_focused()
    await keys.press("?")
    listed = page.page.get_by_role("dialog", name="Shortcuts")
    await expect(listed).to_contain_text("new chat")
    await listed.get_by_label("Keys of one letter").uncheck()
    await keys.press("Escape")
    await keys.press("n")
    await expect(page.answer).to_be_visible()
    await page.button("Shortcuts").click()
    await listed.get_by_label("Keys of one letter").check()
    await page.button("Close").click()
    await keys.press("n")
    await expect(page.answer).to_have_count(0)
    await keys.press("Escape")
    await keys.press("5")
    await expect(page.page.get_by_role("tabpanel", name="Live")).to_be_visible()


async def test_tabs_are_entries_of_the_history(page: Page) -> None:
    await page.open("constructor")
    await expect(page.page.get_by_role("tabpanel", name="Chat")).to_be_visible()
    for name in ("Search", "Live"):
        await page.show(name)
    await expect(page.page).to_have_title("Live · raystream")
    for name in ("Search", "Chat"):
        await page.page.go_back()
        await expect(page.page.get_by_role("tabpanel", name=name)).to_be_visible()
    await page.page.go_forward()
    await expect(page.page.get_by_role("tabpanel", name="Search")).to_be_visible()


async def reach(page: Page, name: str) -> None:
    """Press Tab until an element of this name has the focus, and see that the focus shows."""
    # The body has the focus before the first element and after the last; its text has all names.
    focused = """
    (() => {
      const {activeElement: it} = document;
      if (it === document.body) return {name: "", shows: false};
      const shown = it.closest(".composer, .button") ?? it;
      const style = getComputedStyle(it);
      const outer = getComputedStyle(shown);
      return {
        name: it.getAttribute("aria-label") ?? it.labels?.[0]?.textContent ?? it.textContent,
        shows: style.outlineStyle !== "none" || outer.outlineStyle !== "none"
          || outer.borderColor !== getComputedStyle(document.body).borderColor,
      };
    })()
    """
    for _ in range(60):
        await page.page.keyboard.press("Tab")
        found = await page.tab.evaluate(focused)
        if name in (found["name"] or ""):
            assert found["shows"]
            return
    raise AssertionError(f"Tab does not reach {name}")


async def test_a_screen_reader_is_told_of_ends_and_not_of_each_token(page: Page) -> None:
    await page.open()
    await page.tab.evaluate(
        """
        globalThis.told = [];
        new MutationObserver(() => told.push(document.getElementById("status").textContent))
          .observe(document.getElementById("status"), {childList: true, subtree: true});
        """
    )
    await page.ask("Hello?")
    await page.is_done()
    await expect(page.page.locator("#status")).to_contain_text("Hello, world!")
    assert await page.tab.evaluate("told") == ["The answer begins.", "Answer: Hello, world!"]
    assert await page.page.get_by_role("log").get_attribute("aria-live") == "off"


async def test_a_vendored_file_that_was_changed_does_not_run(browser: Browser, url: str) -> None:
    async with tab_of(browser) as tab:

        async def change(route: Any) -> None:
            answer = await route.fetch()
            await route.fulfill(response=answer, body=await answer.text() + "\nwindow.owned = 1;")

        await tab.page.route("**/vendor/preact.js", change)
        await tab.page.route("**/vendor/dompurify.js", change)
        await tab.page.goto(url)
        await tab.page.wait_for_load_state("networkidle")
        assert await tab.evaluate("window.owned ?? 'untouched'") == "untouched"
        assert await tab.page.get_by_role("tablist").count() == 0
        assert any("integrity" in each for each in tab.complaints)
