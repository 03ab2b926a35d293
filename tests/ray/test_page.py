"""The page against the real server: what its user can do with the embedded models."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from PIL import Image, ImageDraw
from playwright.async_api import Route, expect

from tests.browser import CHROMIUM, opened_tab
from tests.clients.questions import ANSWERS, NAME
from tests.images import png
from tests.ray.serve_run import Server
from tests.serve_app.playground.served_page import Page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]

DEADLINE_S = 60
POLL_S = 0.1
MAX_TOKENS = 2000
NUM_ANSWERS = 16  # the page shows the first; more of them take longer

STOP_AT_ONCE = """
new MutationObserver(() => {
  const stop = [...document.querySelectorAll("button")].find((each) => each.textContent === "Stop");
  if (document.querySelector(".answer .prose")) stop?.click();
}).observe(document.body, {childList: true, subtree: true});
"""


@pytest.fixture
async def page(shipped_server: Server) -> AsyncIterator[Page]:
    async with opened_tab() as tab:
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
    await page.page.locator("input[type=file]").set_input_files(
        {"name": "circle.png", "mimeType": "image/png", "buffer": png(drawing)}
    )
    await page.ask("What is in the picture?")
    await page.says("A red circle.")


async def test_stop_frees_the_sequence(page: Page) -> None:
    async def endlessly(route: Route) -> None:
        body = {
            **json.loads(route.request.post_data or ""),
            "ignore_eos": True,
            "max_tokens": MAX_TOKENS,
            "n": NUM_ANSWERS,
        }
        await route.continue_(post_data=json.dumps(body))

    before = generated_tokens(page.url)
    await page.page.route("**/v1/chat/completions", endlessly)
    # A busy browser hears of a click too late: the page itself presses the button.
    await page.tab.evaluate(STOP_AT_ONCE)
    await page.ask(f"What does {NAME} do?")
    await expect(page.answer).to_contain_text("Stopped here")
    await page.show("Live")
    await expect(page.page.locator(".tiles")).to_contain_text("Running0")
    async with asyncio.timeout(DEADLINE_S):
        while not (num_tokens := generated_tokens(page.url) - before):  # noqa: ASYNC110 - a server's count
            await asyncio.sleep(POLL_S)
    # Half, since what is counted may be a second old: of the whole, most would be counted by then.
    assert num_tokens < NUM_ANSWERS * MAX_TOKENS / 2


def generated_tokens(url: str) -> float:
    """Return how many tokens all replicas have generated."""
    text = httpx.get(f"{url}/metrics", timeout=DEADLINE_S).text
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("vllm:generation_tokens_total{")
    )


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
