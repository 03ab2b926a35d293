"""The page against the real server: what its user can do with the embedded models."""

import re
from collections.abc import AsyncIterator

import pytest
from PIL import Image, ImageDraw
from playwright.async_api import Browser, expect

from tests.browser import tab_of
from tests.clients.questions import ANSWERS, NAME
from tests.images import png
from tests.ray.serve_run import Server
from tests.serve_app.playground.served_page import Page

pytestmark = [pytest.mark.slow, pytest.mark.browser]

DEADLINE_S = 60


@pytest.fixture
async def page(shipped_server: Server, browser: Browser) -> AsyncIterator[Page]:
    async with tab_of(browser) as tab:
        page = Page(tab, shipped_server.url)
        await page.open()
        yield page
        page.check_quiet()


async def test_a_question_and_a_picture_are_answered(page: Page) -> None:
    await page.page.get_by_label("Temperature").fill("0")
    await page.ask(f"What does {NAME} do?")
    await page.is_done()
    await expect(page.answer.locator(".prose")).to_have_text(ANSWERS[NAME])
    await expect(page.answer).to_contain_text("First token after")
    drawing = Image.new("RGB", (112, 112), (225, 225, 225))
    ImageDraw.Draw(drawing).ellipse((20, 20, 92, 92), fill=(255, 0, 0))
    await page.button("New chat").click()
    await page.page.locator(".composer input[type=file]").set_input_files(
        {"name": "circle.png", "mimeType": "image/png", "buffer": png(drawing)}
    )
    await page.ask("What is in the picture?")
    await page.says("A red circle.")
    # The examples of the demo model come out as they should.
    for name, place, told in (
        ("Answer by a JSON schema", ".prose", r'"picture" ?: ?"A \w+ \w+\."'),
        ("Call a tool", ".call pre", r'"kind" ?: ?"(function|class|module)"'),
    ):
        await page.button("New chat").click()
        await page.button(name).click()
        await page.is_done()
        await expect(page.answer.locator(place).first).to_contain_text(re.compile(told))
    await page.show("Live")
    await expect(page.page.locator(".tiles")).to_contain_text("Running0")


async def test_texts_are_classified_and_entries_found(page: Page) -> None:
    await page.show("Classify")
    await page.button("Classify").click()
    result = page.page.get_by_role("region", name="Result")
    await expect(result.locator(".legend")).to_contain_text("pydoc-chat")
    assert await result.locator("mark").count() > 2
    await page.show("Search")
    await page.button("join the parts of a path").click()
    best = page.page.locator(".hits strong").first
    await expect(best).to_have_text("os.path.join", timeout=DEADLINE_S * 1000)
    await page.button("Ask pydoc-chat: What does os.path.join do?").click()
    await page.says(ANSWERS["os.path.join"][:40])
