"""What the page says when something fails, and how one goes on from there."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from playwright.async_api import Browser, expect

from deployments.contract.errors import GenerationFailedError, OverloadedError
from deployments.contract.output import TextDelta
from serve_app.backends.models import serving_states
from serve_app.backends.models.serving_states import ServingState
from tests.browser import tab_of
from tests.raw_http import LOCALHOST
from tests.serve_app.apps import ALICE, ring
from tests.serve_app.fakes import HELLO
from tests.serve_app.playground.served_page import Models, Page, opened, serving
from tests.serve_app.test_sleeping_models import Sleeper


async def test_a_full_server_says_when_to_try_again(page: Page) -> None:
    page.models.chat.scripts = [OverloadedError("The queue is full.", retry_after_s=3)]
    await page.open()
    await page.ask("Hello?")
    alert = page.answer.get_by_role("alert")
    await expect(alert).to_contain_text("The server is full: try again in 3 s.")
    await alert.get_by_role("button", name="Try again").click()
    await page.says("Hello, world!")
    page.tab.complaints.clear()  # the browser itself notes the 503


async def test_a_model_that_loads_is_shown_to_load(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = Sleeper()
    models = Models(sleeper)
    async with opened(browser, models, monkeypatch) as page:
        await page.open()
        await page.ask("Hello?")
        await page.says("Loading m, 0 s so far.")
        sleeper.loads.set()
        await page.says("Hello, world!")
        await expect(page.answer.locator(".waiting")).to_have_count(0)
        page.check_quiet()


async def test_a_page_opened_while_a_model_loads_learns_when_it_is_ready_or_has_failed(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_states, "MEMORY_S", 0.0)
    sleeper = Sleeper()
    sleeper.state = ServingState.DOWN
    models = Models(sleeper)
    async with opened(browser, models, monkeypatch) as page:
        await page.page.clock.install()
        await page.open()
        facts = page.page.locator(".facts")
        await expect(facts).to_contain_text("Stateloading")
        await expect(page.page.get_by_text("It is loading.")).to_be_visible()
        sleeper.state, sleeper.message = ServingState.FAILED, "SomeError: no such folder"
        await page.page.clock.run_for(3_000)
        await expect(facts).to_contain_text("Statefailed")
        await expect(page.page.get_by_text("It could not be started")).to_contain_text(
            "no such folder"
        )
        sleeper.run()
        await page.page.clock.run_for(20_000)
        await expect(facts).to_contain_text("Stateready")
        await expect(facts).to_contain_text("Context128 tokens")
        await expect(page.page.get_by_label("Temperature")).to_have_attribute("placeholder", "1")
        page.check_quiet()


async def test_an_error_in_mid_stream_keeps_what_had_arrived(page: Page) -> None:
    page.models.chat.steps = [
        [TextDelta((1,), "So far")],
        GenerationFailedError("The step has failed."),
    ]
    await page.open()
    await page.ask("Hello?")
    await expect(page.answer.get_by_role("alert")).to_contain_text("The step has failed.")
    await expect(page.answer).to_contain_text("So far")


async def test_a_server_that_is_gone_is_told_and_the_text_stays(
    browser: Browser, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    await_end = asyncio.Event()
    models.chat.steps = [[TextDelta((1,), "So far")], await_end, GenerationFailedError("Gone.")]
    async with tab_of(browser) as tab:
        async with serving(models, monkeypatch) as url:
            page = Page(tab, url)
            await page.open()
            await page.ask("Hello?")
            await page.says("So far")
            await tab.page.context.set_offline(True)
            await_end.set()
        await expect(page.answer.get_by_role("alert")).to_be_visible()
        await expect(page.answer).to_contain_text("So far")
        await page.ask("Are you there?")
        await expect(page.answer.get_by_role("alert")).to_contain_text("can't be reached")


async def test_a_broken_answer_goes_on_where_it_broke(
    browser: Browser, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.chat.scripts = [[HELLO[0], asyncio.Event()], HELLO]
    async with (
        serving(models, monkeypatch) as url,
        passed_on(int(url.rpartition(":")[2])) as (port, cut),
        tab_of(browser) as tab,
    ):
        page = Page(tab, f"http://{LOCALHOST}:{port}")
        await page.open()
        await page.ask("Hello?")
        await page.says("Hello")
        cut()
        await expect(page.answer.get_by_role("alert")).to_contain_text("The connection broke")
        await page.button("Go on").click()
        await page.is_done()
        await expect(page.answer.locator(".prose")).to_have_text("Hello, world!")
        first, again = models.chat.requests
        assert (again.prompt, again.sampling.seed) == (first.prompt, first.sampling.seed)
        assert all("ERR_" in each for each in tab.complaints)  # the browser notes what broke
        assert tab.foreign(page.url, "data:") == []


@asynccontextmanager
async def passed_on(port: int) -> AsyncIterator[tuple[int, Callable[[], None]]]:
    """Pass connections on to a port; yield our port, and a call that breaks those that are open."""
    writers: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(LOCALHOST, port)
        writers.extend((writer, ours))
        await asyncio.gather(copy(reader, ours), copy(theirs, writer))

    def cut() -> None:
        for writer in writers:
            writer.transport.abort()
        writers.clear()

    async with await asyncio.start_server(relay, LOCALHOST, 0) as server:
        try:
            yield server.sockets[0].getsockname()[1], cut
        finally:
            cut()


async def test_a_server_with_keys_asks_for_one_and_keeps_it_in_this_tab_only(
    browser: Browser, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(browser, models, monkeypatch, ring()) as page:
        await page.open()
        alert = page.page.get_by_role("alert")
        await expect(alert).to_contain_text("The server asks for a key.")
        await page.button("Enter a key").click()
        await page.page.get_by_label("API key").fill("sk-wrong-0000000000")
        await page.button("Use it").click()
        await expect(alert).to_contain_text("The server does not know this key.")
        await page.button("Enter a key").click()
        await page.page.get_by_label("API key").fill(ALICE)
        await page.button("Use it").click()
        await page.ask("Hello?")
        await page.says("Hello, world!")
        stored = await page.tab.evaluate("[JSON.stringify(localStorage), document.cookie]")
        assert ALICE not in "".join(stored)
        await page.page.get_by_text("Copy as code").click()
        code = page.page.get_by_role("region", name="curl code")
        await expect(code).to_contain_text("$RAYSTREAM_API_KEY")
        assert ALICE not in await code.inner_text()
        await page.show("Live")
        await expect(page.page.get_by_role("alert")).to_contain_text("lacks the scope 'operate'")
        await expect(page.button("Pin:", exact=False)).to_have_count(0)
        assert page.tab.foreign(page.url, "data:") == []


async def test_a_browser_that_blocks_site_data_shows_the_page_and_uses_the_key(
    browser: Browser, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(models, monkeypatch, ring()) as url, tab_of(browser) as tab:
        await tab.page.add_init_script(
            """
            for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
              Object.defineProperty(window, name, {
                get() { throw new DOMException("Access is denied.", "SecurityError"); },
              });
            }
            """
        )
        page = Page(tab, url)
        await page.open()
        await page.button("Enter a key").click()
        await page.page.get_by_label("API key").fill(ALICE)
        await page.button("Use it").click()
        await page.page.get_by_role("button", name="Colours:").click()
        await page.ask("Hello?")
        await page.says("Hello, world!")
        await expect(page.page.locator("html")).to_have_attribute("data-theme", "light")
        tab.complaints.clear()  # the browser itself notes the 401
        await page.button("New chat").click()
        page.check_quiet()
