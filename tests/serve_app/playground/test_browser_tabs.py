"""The tabs besides the chat and Live, and what one request shows as code."""

import asyncio
import random
from pathlib import Path

import pytest
from PIL import Image
from playwright.async_api import Browser, Route, expect

from deployments.contract.generation import GenerationRequest
from deployments.contract.output import FinishReason, TextDelta
from tests.browser import tab_of
from tests.images import png
from tests.serve_app.fakes import FakeBackend, FakeStream, Step
from tests.serve_app.playground.served_page import Models, Page, opened, serving
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
