from typing import Any

import pytest

from benchmarks.free_port import free_port
from serve_app.client.chat_client import ChatClient, ChatError, Delta, Notice, Usage
from tests.offenders import for_each
from tests.serve_app.client.fake_server import (
    Answering,
    Write,
    chunk,
    end,
    framed,
    refuses,
    says,
    serving,
)

BODY = {"model": "chat", "messages": [{"role": "user", "content": "?"}]}

pytestmark = pytest.mark.in_time


async def read(url: str, key: str | None = None) -> list[Delta | Notice]:
    return [each async for each in ChatClient(url, key).stream(BODY)]


async def refused(answering: Answering) -> str:
    async with serving(answering) as (url, _):
        with pytest.raises(ChatError) as caught:
            await read(url)
    return str(caught.value)


async def test_deltas_and_comments_come_in_order_and_pings_don_t() -> None:
    sent = [
        b": loading chat (2 s)\n\n: ping\n\n",
        chunk("Hel", reasoning_content="Hm"),
        b": moved\n\n",
        chunk("lo"),
        end(2),
    ]
    async with serving(says(*sent)) as (url, seen):
        found = await read(url, "secret")
    assert found == [
        Notice("loading chat (2 s)"),
        Delta("answer-1", "Hel", "Hm"),
        Notice("moved"),
        Delta("answer-1", "lo"),
        Delta("answer-1", finish_reason="stop"),
        Delta("answer-1", usage=Usage(5, 2)),
    ]
    assert seen == [{"authorization": "Bearer secret", **BODY, "stream": True}]


async def test_the_first_model_that_generates_is_asked() -> None:
    async with serving(says()) as (url, _):
        assert await ChatClient(url).first_generator() == "chat"
    # Servers other than raystream.
    async with serving(says(), ({"id": "theirs"},)) as (url, _):
        assert await ChatClient(f"{url}/v1/").first_generator() == "theirs"
    async with serving(says(), ({"id": "detector", "task": "classify"},)) as (url, _):
        with pytest.raises(ChatError, match="generates text"):
            await ChatClient(url).first_generator()


async def test_a_server_that_does_not_run_is_named_with_the_command_that_starts_one() -> None:
    port = free_port()
    with pytest.raises(ChatError) as caught:
        await read(f"http://127.0.0.1:{port}")
    expected = (
        f"nothing answers at http://127.0.0.1:{port}/v1; start a server by `raystream serve`, or "
        "name one by --url"
    )
    assert str(caught.value) == expected


@for_each("", "localhost:8000", "ftp://x", "http://", "http://[::1")
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ChatError, match="no URL"):
        ChatClient(url)


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "param": None, "code": None}}


async def test_a_missing_key_is_asked_for() -> None:
    message = await refused(refuses(401, '{"error": {"message": "No API key was sent."}}'))
    assert message.startswith("No API key was sent. (set RAYSTREAM_API_KEY")


async def test_an_overloaded_server_says_once_when_to_come_back() -> None:
    body = '{"error": {"message": "The model is overloaded."}}'
    assert await refused(refuses(503, body, Retry_After="7")) == (
        "The model is overloaded. (try again in 7 s)"
    )
    body = '{"error": {"message": "Overloaded. Try again in 7 s."}}'
    assert await refused(refuses(503, body, Retry_After="7")) == "Overloaded. Try again in 7 s."


@for_each("", "<html>", "[]", '{"error": "x"}', '{"detail": "x"}')
async def test_a_refusal_of_another_shape_is_told_by_its_status(body: str) -> None:
    assert (await refused(refuses(502, body))).endswith("answers with status 502, Bad Gateway")


async def test_an_error_in_the_stream_is_its_end() -> None:
    assert await refused(says(chunk("a"), framed(error("The model died.")))) == "The model died."


@for_each(b"x", b"{}", b"[]", b'{"choices": [1]}', b'{"choices": 3}')
async def test_events_that_are_no_chunks_are_refused(data: bytes) -> None:
    assert "no chunks" in await refused(says(b"data: " + data + b"\n\n"))


async def test_a_stream_without_its_end_is_not_taken_for_whole() -> None:
    assert "lost before the end" in await refused(says(chunk("a")))

    async def tears(_: dict[str, Any], write: Write) -> None:
        await write(chunk("a"))
        raise ConnectionAbortedError

    assert "lost before the end" in await refused(tears)


async def test_a_page_is_not_taken_for_a_stream() -> None:
    assert "does not stream" in await refused(refuses(200, "<html>"))


@pytest.mark.parametrize("key", ["a\rb", "a\x01", "\u00fc"])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ChatError, match="printable ASCII"):
        ChatClient("http://127.0.0.1:1", key)


async def test_nothing_is_read_behind_the_end() -> None:
    async with serving(says(chunk("a"), end(1), b"data: no chunk\n\n")) as (url, _):
        assert await read(url)
