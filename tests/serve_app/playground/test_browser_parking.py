"""Parking, as the page shows it: a slow answer of low priority, and then a chat that goes first."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest
from playwright.async_api import Browser, expect

from serve_app.config import AppConfig
from serve_app.shipped_files import SHIPPED
from tests.browser import tab_of
from tests.serve_app.local_server import local_server
from tests.serve_app.playground.served_page import Page

DEADLINE_MS = 120_000
LONG = {"type": "string", "minLength": 6000, "maxLength": 8000}
SLOW = {
    "Temperature": "1",
    "Seed": "7",
    "Most tokens": "1200",
    "Priority": "5",
    "JSON schema of the answer, as JSON": json.dumps(LONG),
}
"""An answer that goes on for a second or more."""

CHAT = {
    "model": "pydoc-chat",
    "messages": [{"role": "user", "content": "What does os.walk do?"}],
    "min_tokens": 1200,
    "max_tokens": 1200,
    "n": 4,
}
"""Its answers run one after the other: long enough for the slow answer to be parked."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve a replica that runs one text at a time."""
    model = {
        "id": "pydoc-chat",
        "source": str(SHIPPED / "models" / "pydoc-chat"),
        "device": "cpu",
        "max_num_seqs": 1,
    }
    config = AppConfig.model_validate({"models": [model]})
    with local_server(config) as server, server.listening() as url:
        yield url


async def test_a_slow_answer_is_parked_for_a_chat_and_goes_on(browser: Browser, url: str) -> None:
    async with tab_of(browser) as tab, httpx.AsyncClient(base_url=url, timeout=120) as client:
        page = Page(tab, url)
        page.page.set_default_timeout(DEADLINE_MS)
        await page.open()
        texts = []
        for is_disturbed in (True, False):
            if not is_disturbed:
                await page.button("New chat").click()
            schema = page.page.locator("details", has_text="JSON schema of the answer").last
            await schema.evaluate("each => { each.open = true; }")
            for label, value in SLOW.items():
                await page.page.get_by_label(label).fill(value)
            await page.ask("What does os.path.join do?")
            if is_disturbed:
                await expect(page.answer.locator(".prose")).not_to_be_empty()
                chat = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
                await page.says("Parked: others run first.")
                assert (await chat).json()["usage"]["completion_tokens"] == 4 * 1200
            await page.is_done()
            mark = page.answer.get_by_text("was parked while others ran; nothing was lost")
            await expect(mark).to_have_count(1 if is_disturbed else 0)
            texts.append(await page.answer.locator(".prose").inner_text())
        assert texts[0] == texts[1]
        page.check_quiet()
