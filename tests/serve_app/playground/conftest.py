from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser

from tests.browser import launched
from tests.serve_app.playground.served_page import Models, Page, opened

IN_BROWSER = "test_browser_"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.name.startswith(IN_BROWSER):
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.slow)


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
