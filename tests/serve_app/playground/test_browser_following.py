"""The end of a conversation stays in view while it grows, above a box that grows with its text."""

import asyncio

import pytest
from playwright.async_api import expect

from deployments.contract.output import FinishReason, TextDelta
from tests.serve_app.playground.served_page import Page

SEEN = """
(() => {
  const box = document.querySelector(".composer").getBoundingClientRect();
  const said = [...document.querySelectorAll(".prose")].at(-1).getBoundingClientRect();
  return said.height > 0 && said.bottom <= box.top + 1 && box.bottom <= innerHeight;
})()
"""
"""Whether the last line of the last answer stands above the text box, and both in the window."""

IS_AT_TOP = "scrollY < 5"


def paragraphs(first: int, number: int) -> list[TextDelta]:
    return [TextDelta((i,), f"Line {i}.\n\n") for i in range(first, first + number)]


async def test_a_growing_answer_is_followed_until_its_reader_scrolls_up(page: Page) -> None:
    more = [asyncio.Event() for _ in range(3)]
    page.models.chat.steps = [
        paragraphs(0, 40), more[0], paragraphs(40, 200), more[1], paragraphs(240, 40), more[2],
        paragraphs(280, 40), [TextDelta((1,), "The end.", FinishReason.STOP)],
    ]  # fmt: skip
    await page.open()
    to_end = page.button("To the end")
    await page.ask("A long question\n" * 60)
    await page.says("Line 39.")
    await page.tab.wait_for(SEEN)
    more[0].set()  # more than a window at once
    await page.says("Line 239.")
    await page.tab.wait_for(SEEN)
    await expect(to_end).to_have_count(0)
    await page.page.mouse.move(400, 300)
    await page.page.mouse.wheel(0, -60)
    await expect(to_end).to_be_visible()
    place = await page.tab.evaluate("scrollY")
    more[1].set()
    await page.says("Line 279.")
    assert await page.tab.evaluate("scrollY") == place
    await to_end.click()
    await page.tab.wait_for(SEEN)
    more[2].set()
    await page.is_done()
    await expect(page.answer).to_contain_text("The end.")
    await page.tab.wait_for(SEEN)
    # A question that is asked far from the end is followed, too.
    await page.tab.evaluate("scrollTo(0, 0)")
    await expect(to_end).to_be_visible()
    page.models.chat.steps = [paragraphs(0, 30), [TextDelta((1,), "Well.", FinishReason.STOP)]]
    await page.ask("Another one")
    await page.says("Well.")
    await page.tab.wait_for(SEEN)


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1280, 720)])
async def test_a_conversation_that_fits_does_not_scroll_the_page(
    page: Page, width: int, height: int
) -> None:
    await page.page.set_viewport_size({"width": width, "height": height})
    await page.open()
    # More options than the window shows make no difference.
    await page.page.get_by_text("Tools", exact=True).click()
    await page.button("Insert an example").last.click()
    await page.button("Clear").click()
    for number in range(2):
        await page.ask_anew(f"A short question {number}")
        await expect(page.page.locator(".asked")).to_be_in_viewport(ratio=1)
        assert await page.tab.evaluate(IS_AT_TOP)
    # Nor does a long conversation before it.
    page.models.chat.steps = [paragraphs(0, 60), [TextDelta((1,), "The end.", FinishReason.STOP)]]
    await page.ask_anew("A long answer, please")
    await page.tab.wait_for(SEEN)
    assert not await page.tab.evaluate(IS_AT_TOP)
    page.models.chat.steps = [[TextDelta((1,), "Well.", FinishReason.STOP)]]
    await page.ask_anew("And a short one")
    await expect(page.page.locator(".asked")).to_be_in_viewport(ratio=1)
    assert await page.tab.evaluate(IS_AT_TOP)


async def test_the_text_box_grows_with_its_text_and_shrinks_again(page: Page) -> None:
    await page.open()
    box = page.page.get_by_label("Your message")
    height = "(box) => box.clientHeight"
    small = await box.evaluate(height)
    await box.fill("\n".join(f"line {i}" for i in range(8)))
    grown = await box.evaluate(height)
    assert await box.evaluate("(box) => box.scrollHeight <= box.clientHeight + 1")
    await box.fill("\n".join(f"line {i}" for i in range(60)))
    most = await box.evaluate(height)
    assert small < grown < most <= 0.4 * 900
    await expect(page.button("Send")).to_be_in_viewport(ratio=1)
    await box.fill("x" * 200_000)
    assert await box.evaluate(height) == most
    await box.fill("")
    assert await box.evaluate(height) == small
