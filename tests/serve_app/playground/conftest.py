from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser

from tests.browser import launched
from tests.serve_app.playground.served_page import Models, Page, opened


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with launched() as browser:
        yield browser


@pytest.fixture
def models() -> Models:
    return Models()


@pytest.fixture
async def page(
    browser: Browser, models: Models, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Page]:
    """Serve the page with the fakes; afterwards it must have been quiet."""
    async with opened(browser, models, monkeypatch) as page:
        yield page
        page.check_quiet()
