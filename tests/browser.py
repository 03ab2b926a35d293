"""Controls a headless Chromium by Playwright; it reaches only this machine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

from tests.programs import path_of

DEADLINE_MS = 60_000
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
    "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
COMPLAINTS = ("error", "warning", "assert")

expect.set_options(timeout=DEADLINE_MS)


class Tab:
    """A browser tab."""

    def __init__(self, page: Page) -> None:
        self.page = page  # Playwright's handle
        # The page's errors and warnings, and what it has failed to load.
        self.complaints: list[str] = []
        self.requested: list[str] = []  # the URLs that it has requested
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requested.append(request.url))

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in COMPLAINTS:
            self.complaints.append(f"{message.type}: {message.text} ({message.location})")

    def foreign(self, *own: str) -> list[str]:
        """Return the URLs that it has requested elsewhere than at addresses that begin so."""
        return [url for url in self.requested if not url.startswith(own)]

    async def navigate(self, url: str, width: int, height: int = 900) -> None:
        """Open a page."""
        await self.page.set_viewport_size({"width": width, "height": height})
        await self.page.goto(url, wait_until="commit")

    async def evaluate(self, expression: str) -> Any:
        """Evaluate JavaScript; promises are awaited."""
        return await self.page.evaluate(expression)

    async def wait_for(self, expression: str) -> None:
        """Wait until an expression of JavaScript is true.

        Playwright's `wait_for_function` evaluates it by `eval` from the second look on, which the
        page's Content-Security-Policy forbids.

        Raises:
            TimeoutError: It does not become true.
        """
        async with asyncio.timeout(DEADLINE_MS / 1000):
            while True:
                if await self.evaluate(expression):
                    return
                await asyncio.sleep(0.05)


@asynccontextmanager
async def launched() -> AsyncIterator[Browser]:
    """Start Chromium, and end it after the block."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=path_of("browser"), args=list(FLAGS)
        )
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def tab_of(
    browser: Browser,
    *,
    offline: bool = False,
    color_scheme: Literal["light", "dark"] = "light",
    width: int = 1280,
    height: int = 900,
) -> AsyncIterator[Tab]:
    """Yield a tab with an empty profile; its window is that many pixels wide and high."""
    context = await browser.new_context(
        offline=offline,
        color_scheme=color_scheme,
        reduced_motion="reduce",
        viewport={"width": width, "height": height},
    )
    context.set_default_timeout(DEADLINE_MS)
    try:
        yield Tab(await context.new_page())
    finally:
        await context.close()


@asynccontextmanager
async def opened_tab(*, offline: bool = False) -> AsyncIterator[Tab]:
    """Start Chromium, yield a tab, and end Chromium."""
    async with launched() as browser, tab_of(browser, offline=offline) as tab:
        yield tab
