"""A replica is killed while it answers: the page shows that the answer has moved, and all of it.

docs/page_chat.png and docs/page_live.png are this test's screenshots: run it with
RAYSTREAM_TEST_SCREENSHOTS=docs.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, Locator, Route, expect

from tests.browser import launched, tab_of
from tests.clients.questions import ANSWERS
from tests.faults.served.kinds import about
from tests.faults.served.replicas import Replicas, kill
from tests.faults.served.sizes import NUM_REPLICAS
from tests.ray.serve_run import Server
from tests.serve_app.playground.served_page import Page

pytestmark = [pytest.mark.browser]

NAME = "socket.getdefaulttimeout"
NUM_STREAMS = 6
REQUEST_ID = "slow-on-the-page"
SCREENSHOTS = "RAYSTREAM_TEST_SCREENSHOTS"
"""The environment variable with the folder for screenshots; docs/ keeps two of them."""


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return Path(os.environ.get(SCREENSHOTS, tmp_path))


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with launched() as browser:
        yield browser


@pytest.fixture
async def page(server: Server, browser: Browser) -> AsyncIterator[Page]:
    async with opened_page(server, browser) as page:
        yield page


@pytest.fixture
async def live(server: Server, browser: Browser) -> AsyncIterator[Page]:
    async with opened_page(server, browser) as page:
        yield page


@asynccontextmanager
async def opened_page(server: Server, browser: Browser) -> AsyncIterator[Page]:
    """Open a tab for the page; check afterwards that it has not complained."""
    async with tab_of(browser) as tab:
        page = Page(tab, server.url)
        yield page
        page.check_quiet()


async def test_an_answer_whose_replica_is_killed_goes_on_and_the_page_and_its_live_tab_say_so(
    page: Page, live: Page, client: httpx.AsyncClient, replicas: Replicas, pictures: Path
) -> None:
    await page.open()
    await page.page.get_by_label("Temperature").fill("0")
    await page.ask("What does os.path.join do?")
    await page.is_done()
    await live.open("live")
    tiles = live.page.locator(".tiles")
    moved_before = await shown_number(tiles, "Moved")
    async with busy(client):
        await expect(tiles).to_contain_text(re.compile("Running[1-9]"))
        await page.page.route("**/v1/chat/completions", slowly)
        await page.ask(f"What does {NAME} do?")
        await page.says(ANSWERS[NAME][:8])
        (victim,) = replicas.runs_of(REQUEST_ID)
        kill(victim)
        await page.says("the answer moved to another replica; nothing was lost.")
        await page.is_done()
        await expect(page.answer.locator(".prose")).to_have_text(ANSWERS[NAME])
        await page.page.screenshot(path=pictures / "page_chat.png")
        await expect(tiles).not_to_contain_text(f"Moved{moved_before}")
        await replicas.complete(NUM_REPLICAS)
        table = live.page.get_by_role("region", name="Replicas of pydoc-chat")
        await expect(table.get_by_text("● healthy")).to_have_count(NUM_REPLICAS)
        await expect(tiles).to_contain_text(re.compile("Tokens/s[1-9]"))
        await live.page.screenshot(path=pictures / "page_live.png")


async def slowly(route: Route) -> None:
    """Give a request the id that makes its steps slow."""
    await route.continue_(headers={**route.request.headers, "x-request-id": REQUEST_ID})


async def shown_number(tiles: Locator, name: str) -> int:
    """Return the number on a tile, once it is there."""
    await expect(tiles).to_contain_text(name)
    return int(await tiles.locator("div", has_text=name).locator("dd").inner_text())


@asynccontextmanager
async def busy(client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Keep streams running during the block."""

    async def ask(number: int) -> None:
        while True:
            body = about("os.path.join", seed=number)
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.is_success, answer.text

    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(ask(number)) for number in range(NUM_STREAMS)]
        try:
            yield
        finally:
            for task in asking:
                task.cancel()
