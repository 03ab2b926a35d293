"""The tabs besides the chat, and what one request shows as code."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from playwright.async_api import Browser, Route, expect

from deployments.contract.errors import OverloadedError
from deployments.contract.generation import GenerationRequest
from deployments.contract.output import FinishReason, TextDelta
from deployments.plan.replica_report import ReplicaReport
from serve_app.backends.models import devices, serving_states
from serve_app.backends.models.operator_actions import Scaling
from tests.browser import tab_of
from tests.images import png
from tests.replica_reports import gpu_report
from tests.serve_app.fakes import HELLO, FakeBackend, FakeStream, Step
from tests.serve_app.playground.served_page import Models, Operated, Page, opened, serving
from tests.serve_app.playground.test_browser_chat import texts
from tests.serve_app.playground.test_code import printed_by

LONGEST_ARGUMENT = 128 * 1024
"""What Linux lets a program have as one argument, in bytes."""
OF_PAIRS = "🙂🙃🙂 🚀🚀🚀 is it. " * 3 + "THE END OF IT."
TEXT = "all of this is small. ALL OF THIS IS LARGE."


class TwoSettings(FakeBackend):
    """Answers by the temperature; each setting has scripts of its own."""

    def __init__(self, scripts: dict[float, list[list[Step]]]) -> None:
        super().__init__()
        self.of = scripts

    async def generate(self, request: GenerationRequest) -> FakeStream:
        self.scripts = [self.of[request.sampling.temperature].pop(0)]
        return await super().generate(request)


async def test_two_answers_to_one_question_stand_next_to_each_other(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = asyncio.Event()

    def says(*steps: str | asyncio.Event) -> list[Step]:
        end = TextDelta((2,), ".", FinishReason.STOP)
        given = [[TextDelta((1,), each)] if isinstance(each, str) else each for each in steps]
        return [*given, [end]]

    chat = TwoSettings(
        {
            1.0: [says("One"), says("Brief"), says("Anew")],
            0.5: [says("Other", more, " end"), says("Brief")],
        }
    )
    async with serving(Models(chat), monkeypatch) as url, tab_of(browser) as tab:
        page = Page(tab, url)
        await page.open("compare")
        settings = page.page.locator(".side", has=page.page.get_by_label("Temperature"))
        await settings.nth(1).get_by_label("Temperature").fill("0.5")
        question = page.page.get_by_label("Your question to both")
        await question.fill("Which?")
        await question.press("Enter")
        left = page.page.get_by_role("region", name="A: m")
        right = page.page.get_by_role("region", name="B: m")
        await expect(left).to_contain_text("One.")
        await expect(right).to_contain_text("Other")
        await expect(right.first).to_contain_text("temperature 0.5")
        await expect(left.first).not_to_contain_text("temperature")
        edge, other = await left.bounding_box(), await right.bounding_box()
        assert edge is not None
        assert other is not None
        assert edge["x"] + edge["width"] < other["x"]
        assert edge["y"] == other["y"]
        more.set()
        await expect(right).to_contain_text("Other end.")
        # Each side goes on from its own answer.
        await question.fill("And then?")
        await question.press("Enter")
        await expect(page.page.get_by_text("Brief.")).to_have_count(2)
        said = {each.sampling.temperature: texts(each) for each in chat.requests[2:]}
        assert said == {
            1.0: ["Which?", "One.", "And then?"],
            0.5: ["Which?", "Other end.", "And then?"],
        }
        # An earlier answer is one that the later question goes on from.
        again = left.get_by_role("button", name="Answer again")
        await expect(again).to_have_count(1)
        await again.click()
        await expect(left.last).to_contain_text("Anew.")
        await expect(right.last).to_contain_text("Brief.")
        await expect(right.first).to_contain_text("Other end.")
        await page.page.reload()
        await expect(right.first).to_contain_text("Other end.")
        page.check_quiet()


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


async def test_a_text_is_classified_in_pieces_with_a_legend(page: Page) -> None:
    await page.open("classify")
    await page.page.get_by_label("Text", exact=True).fill(TEXT)
    await page.page.get_by_label("Characters of a piece").fill("22")
    await page.button("Classify").click()
    result = page.page.get_by_role("region", name="Result")
    pieces = result.locator("mark")
    await expect(pieces).to_have_count(2)
    await expect(pieces.nth(0)).to_have_text("all of this is small. A 1.00")
    await expect(pieces.nth(1)).to_contain_text("ALL OF THIS IS LARGE. B")
    # Letters and strokes tell the labels apart, too.
    styles = [
        await each.evaluate("(mark) => getComputedStyle(mark).borderBottomStyle")
        for each in (pieces.nth(0), pieces.nth(1))
    ]
    assert styles == ["solid", "dashed"]
    await expect(result.locator(".legend li")).to_have_count(3)
    await result.get_by_text("Scores of each piece").click()
    await expect(result.get_by_role("row")).to_have_count(3)
    # Pieces are counted in code points.
    await page.page.get_by_label("Text", exact=True).fill(OF_PAIRS)
    await page.button("Classify").click()
    await expect(pieces.first).to_contain_text("🙂")
    shown = [(await piece.inner_text()).rsplit(" ", 2)[0].strip() for piece in await pieces.all()]
    assert " ".join(shown) == OF_PAIRS


async def test_a_search_embeds_the_entries_once_and_a_model_answers_about_the_best(
    page: Page,
) -> None:
    await page.open("search")
    for query in ("abc", "dad"):
        await page.search(query)
        await expect(page.page.locator(".hits li")).to_have_count(8)
    num_texts = sum(len(request.texts) for request in page.models.embedder.requests)
    assert num_texts == 6450 + 2
    await page.page.get_by_text("Copy as code").locator("visible=true").click()
    await expect(page.page.get_by_role("region", name="curl code")).to_contain_text('"dad"')
    best = await page.page.locator(".hits strong").first.inner_text()
    await page.button(f"Ask m: What does {best} do?").click()
    await page.says("Hello, world!")


async def test_a_new_search_stops_the_answer_about_the_one_before(page: Page) -> None:
    page.models.chat.steps = [[TextDelta((1,), "It joins")], asyncio.Event()]
    await page.open("search")
    await page.search("abc")
    await page.button("Ask m: What does", exact=False).click()
    await page.says("It joins")
    await page.search("dad")
    await asyncio.wait_for(page.models.chat.streams[0].closed.wait(), 30)


async def test_a_search_that_fails_late_says_nothing_above_a_newer_one(page: Page) -> None:
    held: list[Route] = []

    async def hold(route: Route) -> None:
        if "slow" in (route.request.post_data or ""):
            held.append(route)
        else:
            await route.continue_()

    await page.open("search")
    await page.search("abc")
    await page.page.route("**/v1/embeddings", hold)
    async with page.page.expect_request("**/v1/embeddings"):
        await page.page.get_by_label("What should it do?").fill("slow")
        await page.button("Search").click()
    await page.search("dad")
    async with page.page.expect_event("requestfailed"):
        await held[0].abort()
    # An answer that is asked for now comes after that failure, and what it changes is drawn.
    await page.tab.evaluate("fetch('v1/models').then(() => new Promise(requestAnimationFrame))")
    await expect(page.page.get_by_role("alert")).to_have_count(0)
    page.tab.complaints.clear()  # the browser itself notes the failed request


async def test_tabs_without_a_model_say_so(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Models(served="m")
    async with opened(browser, models, monkeypatch) as page:
        await page.open("classify")
        await expect(page.page.get_by_text("No model that classifies")).to_be_visible()
        await page.show("Search")
        await expect(page.page.get_by_text("No model that embeds texts")).to_be_visible()


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


async def test_what_a_tab_has_asked_is_shown_as_code_in_each_language(page: Page) -> None:
    await page.open("classify")
    await page.button("Classify").click()
    await page.page.get_by_text("Copy as code").locator("visible=true").click()
    languages = page.page.get_by_role("group", name="Language")
    for language, words in (("Python", "client.post("), ("JavaScript", "fetch("), ("curl", "curl")):
        await languages.get_by_role("button", name=language, exact=True).click()
        code = page.page.get_by_role("region", name=f"{language} code")
        await expect(code).to_contain_text(words)
    assert "small" in await printed_by("bash", "-c", await code.inner_text())
    first, again = page.models.classifier.requests
    assert first.texts == again.texts


async def test_curl_sends_a_picture_of_any_size(page: Page, tmp_path: Path) -> None:
    noise = Image.frombytes("RGB", (256, 256), random.Random(0).randbytes(3 * 256 * 256))
    await page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.open()
    await page.page.locator(".composer input[type=file]").set_input_files(
        {"name": "noise.png", "mimeType": "image/png", "buffer": png(noise)}
    )
    await page.ask("What's this?")
    await page.is_done()
    await page.page.get_by_text("Copy as code").click()
    await page.button("Copy curl").click()
    await expect(page.button("Copied")).to_be_visible()
    code = tmp_path / "code.sh"
    code.write_text(await page.tab.evaluate("navigator.clipboard.readText()"))
    assert code.stat().st_size > LONGEST_ARGUMENT
    assert "world" in await printed_by("bash", str(code))
    first, again = page.models.chat.requests
    assert again.prompt == first.prompt
