"""A replica is killed while it answers: the page shows that the answer has moved, and all of it.

docs/page_chat.png and docs/page_live.png are these tests' screenshots: run them with
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
from playwright.async_api import Locator, Route, expect

from tests.browser import CHROMIUM, opened_tab
from tests.clients.questions import ANSWERS
from tests.faults.served.conftest import NUM_REPLICAS
from tests.faults.served.kinds import about
from tests.faults.served.replicas import Replicas, kill
from tests.ray.serve_run import Server
from tests.serve_app.playground.served_page import Page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]

NAME = "socket.getdefaulttimeout"
NUM_STREAMS = 6
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
    await page.ask("What does os.path.join do?")
    await page.is_done()
    await page.page.route("**/v1/chat/completions", slowly)
    await page.ask(f"What does {NAME} do?")
    await page.says(ANSWERS[NAME][:8])
    (victim,) = replicas.runs_of(REQUEST_ID)
    kill(victim)
    await page.says("the answer moved to another replica; nothing was lost.")
    await page.is_done()
    await expect(page.answer.locator(".prose")).to_have_text(ANSWERS[NAME])
    await page.page.screenshot(path=pictures / "page_chat.png")
    await replicas.complete(NUM_REPLICAS)


async def test_the_live_tab_shows_what_a_kill_does(
    page: Page, client: httpx.AsyncClient, replicas: Replicas, pictures: Path
) -> None:
    await page.open("live")
    tiles = page.page.locator(".tiles")
    moved_before = await shown_number(tiles, "Moved")
    async with busy(client):
        await expect(tiles).to_contain_text(re.compile("Running[1-9]"))
        kill(replicas.alive[0])
        await expect(tiles).not_to_contain_text(f"Moved{moved_before}")
        await replicas.complete(NUM_REPLICAS)
        table = page.page.get_by_role("region", name="Replicas of pydoc-chat")
        await expect(table.get_by_text("● healthy")).to_have_count(NUM_REPLICAS)
        await expect(tiles).to_contain_text(re.compile("Tokens/s[1-9]"))
        await page.page.screenshot(path=pictures / "page_live.png")


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
