"""The tab Live: models, what an operator does to them, counts and batches."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.async_api import Browser, Route, expect

from deployments.contract.errors import OverloadedError
from deployments.contract.output import TextDelta
from deployments.plan.replica_report import LightSleep, ReplicaReport, SleepState
from serve_app.backends.models import devices, serving_states
from serve_app.backends.models.operator_actions import Scaling
from tests.replica_reports import NOW_S, gpu_report
from tests.serve_app.fakes import HELLO
from tests.serve_app.playground.served_page import Models, Operated, Page, opened


@pytest.mark.parametrize(("tab", "num_pings"), [("Chat", 0), ("Live", 1)])
async def test_a_model_that_sleeps_is_woken_by_a_button(
    browser: Browser, monkeypatch: pytest.MonkeyPatch, tab: str, num_pings: int
) -> None:
    monkeypatch.setattr(serving_states, "MEMORY_S", 0.0)
    sleeper = Operated()
    async with opened(browser, Models(sleeper), monkeypatch) as page:
        await page.open(tab.lower())
        shown = page.page.get_by_role("tabpanel", name=tab)
        await expect(shown).to_contain_text("asleep")
        await shown.get_by_role("button", name="Wake m").click()
        await expect(shown).to_contain_text("Waking m")
        sleeper.loads.set()
        await expect(shown).to_contain_text("ready")
        await expect(shown.get_by_role("button", name="Wake m")).to_have_count(0)
        # Only operators see the tab Live, where the button is their action. In the chat it is a
        # request that any user may send.
        assert sleeper.num_pings == num_pings
        page.check_quiet()


async def test_live_tells_which_replicas_sleep_lightly_and_that_their_model_is_asleep(
    page: Page,
) -> None:
    asleep, awake = (LightSleep(state, NOW_S) for state in (SleepState.ASLEEP, SleepState.AWAKE))
    first, second = gpu_report("r1"), gpu_report("r2")
    page.models.reports = {
        "m": (replace(first, light_sleep=asleep), replace(second, light_sleep=awake))
    }
    await page.open("live")
    model = page.page.get_by_role("region", name="m", exact=True)
    rows = page.page.get_by_role("region", name="Replicas of m").get_by_role("row")
    await expect(rows.nth(1)).to_contain_text("● healthy, asleep")
    await expect(rows.nth(2)).not_to_contain_text("awake")
    await expect(model.locator(".tag")).to_have_text(["generate", "ready"])
    page.models.reports = {
        "m": (replace(first, light_sleep=asleep), replace(second, light_sleep=asleep))
    }
    await expect(model.locator(".tag")).to_have_text(["generate", "asleep"])
    await expect(model.get_by_role("button")).to_have_text(["Wake m", "Pin", "Put to sleep"])


async def test_an_operator_puts_a_model_to_sleep_and_pins_it(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_states, "MEMORY_S", 0.0)
    sleeper = Operated()
    sleeper.run()
    async with opened(browser, Models(sleeper), monkeypatch) as page:
        await page.open("live")
        model = page.page.get_by_role("region", name="m", exact=True)
        tags = model.locator(".tag")
        await page.button("Put to sleep: m").click()
        await expect(tags).to_have_text(["generate", "ready", "going to sleep"])
        assert sleeper.wish == "sleep"
        await expect(page.button("Cancel sleep: m")).to_be_focused()
        await page.button("Cancel sleep: m").click()
        await expect(tags).to_have_text(["generate", "ready"])
        assert sleeper.wish is None
        await page.button("Pin: m").click()
        await expect(tags).to_have_text(["generate", "ready", "pinned"])
        assert sleeper.wish == "pin"
        # A pinned model does not sleep.
        await expect(model.get_by_role("button")).to_have_text(["Unpin"])
        await expect(page.button("Unpin: m")).to_be_focused()
        await page.button("Unpin: m").click()
        await expect(tags).to_have_text(["generate", "ready"])
        assert sleeper.wish is None
        page.check_quiet()
        sleeper.scaling = Scaling(1, has_load_policy=True)
        await page.button("Put to sleep: m").click()
        await expect(model.get_by_role("alert")).to_contain_text("write min_replicas: 0 in the")
        await expect(tags).to_have_text(["generate", "ready"])


async def test_live_shows_what_an_action_has_left_until_newer_figures_come(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "MEMORY_S", 0.0)
    models = Models()
    async with opened(browser, models, monkeypatch) as page:
        clock = page.page.clock
        await clock.install(time=0)
        await page.open("live")
        running = page.page.locator(".tiles div", has_text="Running")
        await expect(running).to_contain_text("now 7")
        await clock.pause_at(3_600)
        models.reports = runs(1)
        while "now 1" not in await running.inner_text():
            await clock.run_for(100)
        # The figures have just come; the next ones come in two seconds. They never say that the
        # model is pinned, since nothing scales it.
        await clock.run_for(1_000)
        await page.button("Pin: m").click()
        await expect(page.button("Unpin: m")).to_be_visible()
        models.reports = runs(2)
        await clock.run_for(1_000)
        await expect(running).to_contain_text("now 2")
        await expect(page.button("Unpin: m")).to_be_visible()
        models.reports = runs(3)
        await clock.run_for(2_000)
        await expect(running).to_contain_text("now 3")
        await expect(page.button("Pin: m")).to_be_visible()
        page.check_quiet()


async def test_live_shows_replicas_and_counts_and_asks_only_while_it_is_seen(page: Page) -> None:
    await page.page.clock.install()
    await page.open("live")
    table = page.page.get_by_role("region", name="Replicas of m")
    await expect(table.get_by_role("row")).to_have_count(3)
    for shown in ("r1", "● healthy", "3 of 8", "25.0 %", "40.0 GiB"):
        await expect(table.get_by_role("row").nth(1)).to_contain_text(shown)
    failing = page.page.get_by_role("region", name="Replicas of c")
    await expect(failing).to_contain_text("▲ failing")
    tiles = page.page.locator(".tiles")
    running = tiles.locator("div", has_text="Running")
    await expect(running).to_contain_text("now 7")
    await expect(tiles.locator("div", has_text="Waiting")).to_contain_text("now 2")
    await expect(page.page.get_by_role("img", name="Memory of m")).to_be_visible()
    await expect(tiles.locator("div", has_text="Parked")).to_contain_text("0")
    await expect(table.get_by_role("row").nth(1)).to_contain_text("1 (1 for memory; up to 2.5 s)")
    keys = page.page.get_by_role("region", name="What each key gets")
    await page.page.clock.run_for(3_000)  # an average takes two readings
    await expect(keys.get_by_role("row").nth(1)).to_contain_text("alice")
    evenness = page.page.get_by_role("region", name="Keys", exact=True).locator(".detail")
    await expect(evenness).to_contain_text("Keys that wait: 120 weighted tokens apart")
    # What changes is shown without a touch.
    page.models.reports = runs(5)
    await expect(running).to_contain_text("now 5")
    await page.show("Chat")
    seen = len(page.tab.requested)
    await page.page.clock.run_for(60_000)
    assert [url for url in page.tab.requested[seen:] if "devices" in url] == []
    await page.show("Live")
    for _ in range(2):
        async with page.page.expect_request("**/v1/devices"):
            await page.page.clock.run_for(3_000)


async def test_live_counts_refusals(page: Page) -> None:
    full = OverloadedError("The queue is full.")
    page.models.chat.scripts = [full, full]
    await page.open()
    for _ in range(2):
        await page.ask("Hello?")
        await expect(page.answer.get_by_role("alert")).to_contain_text("The server is full")
    await page.show("Live")
    await expect(page.page.locator(".tiles")).to_contain_text("Refused2")
    page.tab.complaints.clear()  # the browser itself notes the 503s


async def test_counts_do_not_fall_when_a_process_ends(page: Page) -> None:
    counts = {"a": 5, "b": 2}

    async def answer(route: Route) -> None:
        await route.fulfill(body="".join(refused(name, count) for name, count in counts.items()))

    await page.page.clock.install()
    await page.page.route("**/metrics", answer)
    await page.open("live")
    tiles = page.page.locator(".tiles")
    await expect(tiles).to_contain_text("Refused7")
    for counts, told in (({"b": 3}, 8), ({"a": 1, "b": 4}, 9)):  # noqa: B007 - `answer` reads it
        await page.page.clock.run_for(3_000)
        await expect(tiles).to_contain_text(f"Refused{told}")


async def test_live_shows_how_far_each_batch_is_and_cancels_one(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Models(folder=tmp_path / "jobs")
    models.chat.scripts = [HELLO, [[TextDelta((1,), "No end")], asyncio.Event()]]
    async with opened(browser, models, monkeypatch) as page:
        await page.open("live")
        batches = page.page.get_by_role("region", name="Batches")
        await expect(batches).to_contain_text("None.")
        await page.run_batch()
        running = await page.run_batch("one", "two")
        rows = batches.get_by_role("row")
        first = rows.filter(has_text=running)
        await expect(first).to_contain_text("in progress")
        progress = first.get_by_role("progressbar")
        await expect(progress).to_have_js_property("max", 2)
        await expect(progress).to_have_js_property("value", 1)
        await expect(first.get_by_role("cell")).to_contain_text(
            [running, "in progress", "", "1", "0", "2"]
        )
        # The newest is the first; one that failed says why, and has no button.
        await expect(rows.nth(1)).to_contain_text(running)
        await expect(rows.nth(2)).to_contain_text("The file holds no request.")
        await expect(rows.nth(2).get_by_role("button")).to_have_count(0)
        # A click by mistake cancels nothing.
        await page.button(f"Cancel {running}").click()
        await page.button("Keep it").click()
        assert not models.chat.streams[1].closed.is_set()
        await page.button(f"Cancel {running}").click()
        await page.button(f"Cancel {running} now").click()
        await expect(first).to_contain_text("cancelled")
        await expect(first.get_by_role("button")).to_have_count(0)
        await asyncio.wait_for(models.chat.streams[1].closed.wait(), 30)
        page.check_quiet()
        # The store's disk fails: the replicas are still shown.
        await page.page.route("**/v1/batches?*", unreadable)
        await expect(batches.get_by_role("alert")).to_contain_text("can't use its disk")
        await expect(page.page.get_by_role("region", name="Replicas of m")).to_be_visible()


async def test_live_shows_the_replicas_while_the_list_of_batches_takes_its_time(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(route: Route) -> None:
        is_asked.set()
        await goes_on.wait()
        await route.fallback()

    async with opened(browser, Models(folder=tmp_path / "jobs"), monkeypatch) as page:
        await page.page.route("**/v1/batches?*", slow)
        await page.open("live")
        await asyncio.wait_for(is_asked.wait(), 30)
        await expect(page.page.get_by_role("region", name="Replicas of m")).to_be_visible()
        # The figures are read again, too.
        await expect(page.page.get_by_role("tabpanel", name="Live")).to_contain_text("on average")
        batches = page.page.get_by_role("region", name="Batches")
        await expect(batches).to_have_count(0)
        goes_on.set()
        await expect(batches).to_contain_text("None.")
        page.check_quiet()


async def unreadable(route: Route) -> None:
    await route.fulfill(status=503, json={"error": {"code": "jobs_unavailable"}})


async def test_live_asks_for_no_batches_of_a_server_that_keeps_none(page: Page) -> None:
    await page.page.clock.install()
    await page.open("live")
    await expect(page.page.locator(".tiles")).to_be_visible()
    async with page.page.expect_request("**/v1/devices"):
        await page.page.clock.run_for(3_000)
    assert [url for url in page.tab.requested if "batches" in url] == []
    await expect(page.page.get_by_role("region", name="Batches")).to_have_count(0)


def runs(num_running: int) -> dict[str, tuple[ReplicaReport, ...]]:
    """Return the reports of one replica that runs as many sequences."""
    report = gpu_report("r1")
    return {"m": (replace(report, work=replace(report.work, num_running=num_running)),)}


def refused(replica: str, count: int) -> str:
    return f'vllm:admission_rejections_total{{model_name="m",replica="{replica}"}} {count}.0\n'
