"""One's own texts in "Classify" and "Search", base models, and the demo model's examples."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from playwright.async_api import Route, expect

from deployments.contract.output import FinishReason, TextDelta
from tests.serve_app.playground.served_page import Page

TABLE = b'id,comment\n1,"all of this, is small"\n2,ALL OF THIS IS LARGE\n3,\n'


async def saved(page: Page, tmp_path: Path) -> list[list[str]]:
    """Save what was found as CSV; return its rows."""
    async with page.page.expect_download() as downloading:
        await page.button("Save as CSV").click()
    file = tmp_path / "saved.csv"
    await (await downloading.value).save_as(file)
    return list(csv.reader(io.StringIO(file.read_text("utf-8"))))


async def test_own_texts_are_classified_with_a_threshold_and_saved(
    page: Page, tmp_path: Path
) -> None:
    await page.open("classify")
    await page.page.get_by_text("Many texts").click()
    await page.page.get_by_label("Texts, one a line").fill("small one\n\nLARGE ONE\n")
    await page.button("Classify").click()
    results = page.page.get_by_role("region", name="Results")
    await expect(results.get_by_role("row")).to_have_count(3)
    assert page.models.classifier.requests[0].texts == ("small one", "LARGE ONE")
    # A file takes the lines' place.
    await page.page.locator(".own input[type=file]").set_input_files(
        {"name": "a.csv", "mimeType": "text/csv", "buffer": TABLE}
    )
    await expect(page.page.get_by_label("Column with the texts")).to_have_value("1")
    await page.button("Classify").click()
    await expect(results).to_contain_text("all of this, is small")
    await page.page.get_by_label("Threshold").fill("1.1")
    await expect(results.get_by_role("cell", name="below the threshold")).to_have_count(2)
    await page.page.get_by_label("Threshold").fill("0.5")
    names, small, large = await saved(page, tmp_path)
    assert names[:3] == ["id", "comment", "label"]
    assert all(name.startswith("score of ") for name in names[3:])
    assert (small[0], small[1], large[0]) == ("1", "all of this, is small", "2")
    assert small[2] != large[2]


async def test_a_classification_that_is_left_ends(page: Page) -> None:
    async def hold(_: Route) -> None:
        pass

    await page.page.route("**/v1/classify", hold)
    await page.open("classify")
    await page.page.get_by_text("Many texts").click()
    await page.page.get_by_label("Texts, one a line").fill("one")
    async with page.page.expect_request("**/v1/classify"):
        await page.button("Classify").click()
    async with page.page.expect_event("requestfailed"):
        await page.page.get_by_text("One text, in pieces").click()


async def test_own_texts_are_searched_and_saved(page: Page, tmp_path: Path) -> None:
    await page.open("search")
    await page.page.get_by_text("Your own texts").click()
    await page.page.get_by_label("Texts, one a line").fill("abc\ndad\nzzz")
    await page.page.get_by_label("What are you looking for?").fill("abc")
    await page.button("Search").click()
    found = page.page.get_by_role("region", name='Texts found for "abc"')
    await expect(found.locator(".hits li")).to_have_count(3)
    await expect(found.locator(".hits li").first).to_contain_text("abc")
    rows = await saved(page, tmp_path)
    assert rows[0] == ["text", "similarity"]
    assert rows[1][0] == "abc"
    await page.page.get_by_label("Least similarity").fill("1.1")
    await expect(found.locator(".hits li")).to_have_count(0)
    assert sum(len(request.texts) for request in page.models.embedder.requests) == 3 + 1


async def test_a_base_model_goes_on_with_a_text_that_is_kept(page: Page) -> None:
    page.models.chat.description = replace(page.models.chat.description, has_chat_template=False)
    page.models.chat.scripts = [
        [[TextDelta((1,), text, FinishReason.STOP)]] for text in (" upon a time", " more")
    ]
    await page.open()
    text = page.page.get_by_label("Text to continue")
    await text.fill("Once")
    await page.button("Continue").click()
    await expect(text).to_have_value("Once upon a time")
    await page.button("Continue otherwise").click()
    await expect(text).to_have_value("Once more")
    assert [request.prompt for request in page.models.chat.requests] == ["Once", "Once"]
    await page.page.reload()
    await expect(text).to_have_value("Once more")
    await page.button("Undo").click()
    await expect(text).to_have_value("Once")
    await expect(page.page.get_by_label("System prompt")).to_have_count(0)


async def test_a_base_model_leaves_conversations_readable(page: Page) -> None:
    await page.open()
    await page.ask_anew("Hello?")
    page.models.chat.description = replace(page.models.chat.description, has_chat_template=False)
    await page.page.reload()
    await page.says("Hello, world!")
    for name in ("Edit", "Answer again", "Send"):
        await expect(page.button(name)).to_have_count(0)
    await page.button("Go on with a text").click()
    await expect(page.page.get_by_label("Text to continue")).to_be_focused()
    await page.button("Hello?", exact=False).first.click()
    await page.says("Hello, world!")


async def test_the_demo_model_says_what_it_is_and_shows_what_it_can_do(page: Page) -> None:
    asked: list[dict[str, Any]] = []

    async def rename(route: Route) -> None:
        answer = await route.fetch()
        text = (await answer.text()).replace('"id":"m"', '"id":"pydoc-chat"')
        await route.fulfill(response=answer, body=text)

    async def answer(route: Route) -> None:
        asked.append(json.loads(route.request.post_data or ""))
        chunk = {"choices": [{"delta": {"content": "Hello"}, "finish_reason": "stop"}]}
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        await route.fulfill(content_type="text/event-stream", body=body)

    await page.page.route("**/v1/models", rename)
    await page.page.route("**/v1/chat/completions", answer)
    await page.open()
    await expect(page.page.locator(".badge")).to_contain_text("A tiny model that knows Python's")
    for name in ("Name a drawn shape", "Answer by a JSON schema", "Call a tool"):
        await page.button(name).click()
        await page.is_done()
        await page.button("New chat").click()
    plain, schema, tool = asked
    for body in (plain, schema):
        (message,) = body["messages"]
        assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert not {"response_format", "tools"} & plain.keys()
    picture = schema["response_format"]["json_schema"]["schema"]["properties"]["picture"]
    assert "A red circle." in picture["enum"]
    (offered,) = tool["tools"]
    kind = offered["function"]["parameters"]["properties"]["kind"]
    assert kind["enum"] == ["function", "class", "module"]
    assert tool["tool_choice"] == "required"
