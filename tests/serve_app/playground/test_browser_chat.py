"""The tab "Chat" as its user uses it."""

import asyncio
import base64

import pytest
from PIL import Image
from playwright.async_api import Browser, expect

from deployments.contract.errors import OverloadedError
from deployments.contract.generation import GenerationRequest
from deployments.contract.messages import ChatMessage, ImagePart, TextPart
from deployments.contract.output import FinishReason, TextDelta
from tests.images import png
from tests.serve_app.fakes import HELLO, FakeBackend, Step
from tests.serve_app.playground.served_page import Models, Page, opened


def texts(request: GenerationRequest) -> list[str]:
    """Return the text of each message."""
    assert isinstance(request.prompt, tuple)
    return [
        "".join(part.text for part in message.parts if isinstance(part, TextPart))
        for message in request.prompt
        if isinstance(message, ChatMessage)
    ]


def roles(request: GenerationRequest) -> list[str]:
    assert isinstance(request.prompt, tuple)
    return [message.role for message in request.prompt if isinstance(message, ChatMessage)]


def said(*texts: str) -> list[Step]:
    """Return a stream that says these texts, one after the other, and stops."""
    return [
        [TextDelta((i,), text, FinishReason.STOP if i == len(texts) - 1 else None)]
        for i, text in enumerate(texts)
    ]


async def test_an_answer_streams_with_its_figures(page: Page) -> None:
    more = asyncio.Event()
    page.models.chat.steps = [[TextDelta((1,), "One ")], more, *said("two ", "three")]
    await page.page.clock.install()
    await page.open()
    await page.ask("Count!")
    await page.says("One")
    await expect(page.answer).to_have_attribute("aria-busy", "true")
    await expect(page.answer).to_contain_text("1 token")
    await page.page.clock.fast_forward(1000)  # ms, for there is no speed within an instant
    more.set()
    await page.is_done()
    await expect(page.answer).to_contain_text("One two three")
    for figure in ("First token after", "tokens/s", "3 tokens", "7 tokens"):
        await expect(page.answer).to_contain_text(figure)
    await expect(page.page.locator("#status")).to_contain_text("Answer: One two three")


async def test_stop_frees_the_sequence_and_keeps_the_text(page: Page) -> None:
    page.models.chat.steps = [[TextDelta((1,), "As far as")], asyncio.Event()]
    await page.open()
    await page.ask("Go on and on")
    await page.says("As far as")
    await page.button("Stop").click()
    await asyncio.wait_for(page.models.chat.streams[0].closed.wait(), 30)
    await expect(page.answer).to_contain_text("Stopped here")
    await expect(page.answer).to_contain_text("As far as")


async def test_an_answer_can_be_had_again_and_a_question_edited(page: Page) -> None:
    await page.open()
    await page.ask("First")
    await page.is_done()
    await page.button("Answer again").click()
    await page.is_done()
    await page.button("Edit").click()
    await page.page.get_by_label("Edit the question").fill("Second")
    await page.button("Ask again").click()
    await page.is_done()
    assert [texts(request) for request in page.models.chat.requests] == [
        ["First"],
        ["First"],
        ["Second"],
    ]
    assert await page.page.get_by_role("article", name="Question").count() == 1


async def test_an_older_answer_that_is_had_again_stops_the_running_one(page: Page) -> None:
    more = asyncio.Event()
    page.models.chat.scripts = [HELLO, [[TextDelta((1,), "Half an")], more], said("Anew")]
    await page.open()
    await page.ask("First")
    await page.is_done()
    await page.ask("Second")
    await page.says("Half an")
    await page.button("Answer again").click()
    await asyncio.wait_for(page.models.chat.streams[1].closed.wait(), 30)
    await page.is_done()
    await expect(page.answer).to_contain_text("Anew")
    await expect(page.button("Send")).to_be_visible()
    assert texts(page.models.chat.requests[2]) == ["First"]


async def test_a_mistake_in_the_settings_changes_nothing_in_the_conversation(page: Page) -> None:
    await page.open()
    await page.ask("First")
    await page.is_done()
    await page.page.locator("summary", has_text="JSON schema of the answer").click()
    await page.page.get_by_label("JSON schema of the answer, as JSON").fill("{")
    alert = page.page.get_by_role("alert")
    await page.button("Answer again").click()
    await expect(alert).to_contain_text("The JSON schema is no JSON")
    await page.button("Edit").click()
    await page.page.get_by_label("Edit the question").fill("Changed")
    await page.button("Ask again").click()
    await expect(page.page.get_by_label("Edit the question")).to_have_value("Changed")
    await page.ask("Second")
    await expect(page.page.get_by_label("Your message")).to_have_value("Second")
    await expect(page.page.get_by_role("article")).to_have_count(2)
    await expect(page.answer).to_contain_text("Hello, world!")
    assert len(page.models.chat.requests) == 1


async def test_settings_reach_the_request(page: Page) -> None:
    await page.open()
    fields = {
        "Temperature": "0.5",
        "Top p": "0.9",
        "Top k": "7",
        "Min p": "0.1",
        "Most tokens": "9",
    }
    fields |= {"Seed": "3", "Presence penalty": "0.2", "Frequency penalty": "0.3"}
    for label, value in fields.items():
        await page.page.get_by_label(label, exact=True).fill(value)
    await page.page.get_by_label("System prompt").fill("Be brief.")
    await page.page.get_by_label("Stop at (one text a line)").fill("END\nFIN")
    await page.ask("Hello")
    await page.is_done()
    (request,) = page.models.chat.requests
    assert texts(request) == ["Be brief.", "Hello"]
    params = request.sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.max_tokens, params.seed, params.stop) == (9, 3, ("END", "FIN"))
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)


async def test_a_schema_and_tools_reach_the_request_and_a_mistake_is_told(page: Page) -> None:
    await page.open()
    await page.page.locator("summary", has_text="JSON schema of the answer").click()
    schema = page.page.get_by_label("JSON schema of the answer, as JSON")
    await schema.fill("{")
    await page.ask("Hello")
    await expect(page.page.get_by_role("alert")).to_contain_text("The JSON schema is no JSON")
    assert page.models.chat.requests == []
    await page.button("Insert an example").first.click()
    await page.ask("Hello")
    await page.is_done()
    assert page.models.chat.requests[0].sampling.grammar is not None


async def test_a_call_is_shown_and_its_result_is_sent_back(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Models(FakeBackend(tool_call_format="hermes"))
    call = '<tool_call>\n{"name": "look_up", "arguments": {"name": "os.path"}}\n</tool_call>'
    models.chat.scripts = [said(call), said("It is a module.")]
    async with opened(browser, models, monkeypatch) as page:
        await page.open()
        await page.page.locator("summary", has_text="Tools").click()
        await page.button("Insert an example").last.click()
        await page.ask("What is os.path?")
        await page.page.get_by_role("region", name="Call of look_up").wait_for()
        await page.page.get_by_label("Result of look_up").fill("module os.path")
        await page.button("Send the results").click()
        await page.says("It is a module.")
        assert roles(models.chat.requests[1]) == ["user", "assistant", "tool"]
        assert texts(models.chat.requests[1])[-1] == "module os.path"
        page.check_quiet()


async def test_a_call_s_result_is_sent_again_after_an_answer_that_has_failed(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Models(FakeBackend(tool_call_format="hermes"))
    call = '<tool_call>\n{"name": "look_up", "arguments": {"name": "os.path"}}\n</tool_call>'
    models.chat.scripts = [said(call), OverloadedError("The queue is full."), said("A module.")]
    async with opened(browser, models, monkeypatch) as page:
        await page.open()
        await page.page.locator("summary", has_text="Tools").click()
        await page.button("Insert an example").last.click()
        await page.ask("What is os.path?")
        await page.page.get_by_label("Result of look_up").fill("module os.path")
        await page.button("Send the results").click()
        await expect(page.answer.get_by_role("alert")).to_contain_text("The server is full")
        await page.ask("Well?")
        await page.says("A module.")
        assert roles(models.chat.requests[2]) == ["user", "assistant", "tool", "user"]


async def test_reasoning_stands_apart(page: Page) -> None:
    page.models.chat.reason()
    page.models.chat.steps = [
        [TextDelta((8, 1, 9), "<think>Let me see.</think>")],
        [TextDelta((2,), "It joins.", FinishReason.STOP)],
    ]
    await page.open()
    await page.ask("What does it do?")
    await page.is_done()
    await expect(page.answer.locator(".reasoning")).to_contain_text("Let me see.")
    await expect(page.answer.locator(":scope > .prose")).to_have_text("It joins.")


async def test_a_picture_is_asked_about_by_picker_paste_and_drop(page: Page) -> None:
    picture = png(Image.new("RGB", (8, 8), "red"))
    await page.open()
    chooser = page.page.locator(".composer input[type=file]")
    await chooser.set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": picture})
    given = base64.b64encode(picture).decode()
    for event, holder in (("paste", "clipboardData"), ("drop", "dataTransfer")):
        await page.tab.evaluate(
            f"""(async () => {{
              const bytes = Uint8Array.from(atob("{given}"), (each) => each.charCodeAt(0));
              const data = new DataTransfer();
              data.items.add(new File([bytes], "b.png", {{type: "image/png"}}));
              const made = new {"ClipboardEvent" if event == "paste" else "DragEvent"}(
                "{event}", {{bubbles: true, cancelable: true, {holder}: data}});
              document.querySelector(".composer textarea").dispatchEvent(made);
            }})()"""
        )
    await expect(page.page.get_by_role("img", name="Picture")).to_have_count(3)
    await page.button("Remove picture 3").click()
    await page.ask("Which shapes?")
    await page.is_done()
    (request,) = page.models.chat.requests
    assert isinstance(request.prompt, tuple)
    (message,) = request.prompt
    assert isinstance(message, ChatMessage)
    assert [type(part) for part in message.parts] == [ImagePart, ImagePart, TextPart]
    await expect(page.page.get_by_role("img", name="Attached picture")).to_have_count(2)


async def test_selected_text_can_be_dragged_into_the_message(page: Page) -> None:
    await page.open()
    await page.ask("Hello?")
    await page.is_done()
    said = page.answer.locator(".prose p")
    await said.select_text()
    await said.drag_to(page.page.get_by_label("Your message"), source_position={"x": 10, "y": 10})
    await expect(page.page.get_by_label("Your message")).to_have_value("Hello, world!")


async def test_text_files_are_attached_as_text_and_others_refused_in_words(page: Page) -> None:
    await page.open()
    chooser = page.page.locator(".composer input[type=file]")
    await chooser.set_input_files(
        {"name": "a.py", "mimeType": "text/x-python", "buffer": b"x = 1\n"}
    )
    await chooser.set_input_files({"name": "a.bmp", "mimeType": "image/bmp", "buffer": b"BM"})
    await expect(page.page.get_by_role("alert")).to_contain_text("a.bmp can't be sent")
    await expect(page.page.get_by_role("list", name="Attached files")).to_contain_text(
        "a.py 6 bytes"
    )
    await page.ask("What does it do?")
    await page.is_done()
    assert texts(page.models.chat.requests[0]) == ["a.py:\n\n```\nx = 1\n```\n\nWhat does it do?"]
    question = page.page.get_by_role("article", name="Question")
    await question.get_by_text("a.py").click()
    await expect(question.get_by_role("region", name="a.py")).to_have_text("x = 1")
