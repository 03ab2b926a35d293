"""A replica is killed while it answers: the page shows that the answer has moved, and all of it."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Route, expect

from tests.browser import CHROMIUM, opened_tab
from tests.clients.questions import ANSWERS
from tests.faults.served.conftest import NUM_REPLICAS
from tests.faults.served.replicas import Replicas, kill
from tests.ray.serve_run import Server
from tests.serve_app.playground.served_page import Page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]

NAME = "socket.getdefaulttimeout"
REQUEST_ID = "slow-on-the-page"
SCREENSHOTS = "RAYSTREAM_TEST_SCREENSHOTS"
"""The environment variable with the folder for screenshots; docs/ keeps two of them."""


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return Path(os.environ.get(SCREENSHOTS, tmp_path))


@pytest.fixture
async def page(server: Server) -> AsyncIterator[Page]:
    async with opened_tab() as tab:
        page = Page(tab, server.url)
        yield page
        page.check_quiet()


async def test_an_answer_whose_replica_is_killed_goes_on_and_the_page_says_so(
    page: Page, replicas: Replicas, pictures: Path
) -> None:
    async def slowly(route: Route) -> None:
        await route.continue_(headers={**route.request.headers, "x-request-id": REQUEST_ID})

    await page.open()
    await page.page.get_by_label("Temperature").fill("0")
    await page.page.route("**/v1/chat/completions", slowly)
    await page.ask(f"What does {NAME} do?")
    await page.says(ANSWERS[NAME][:8])
    (victim,) = replicas.runs_of(REQUEST_ID)
    kill(victim)
    await page.says("the answer moved to another replica; nothing was lost.")
    await page.is_done()
    await expect(page.answer.locator(".prose")).to_have_text(ANSWERS[NAME])
    await page.page.screenshot(path=pictures / "page_chat.png")
    await page.show("Live")
    await expect(page.page.locator(".tiles")).to_contain_text("Moved1")
    await replicas.complete(NUM_REPLICAS)
    table = page.page.get_by_role("region", name="Replicas of pydoc-chat")
    await expect(table.get_by_text("● healthy")).to_have_count(NUM_REPLICAS)
    await page.page.screenshot(path=pictures / "page_live.png")
