"""One server of a fleet: what it is asked, and what becomes of each of its answers."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession, web

from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.vllm_engine.fleet import server as module
from deployments.vllm_engine.fleet.server import (
    GENERATE,
    HEALTH,
    MODELS,
    REST_S,
    Gained,
    Output,
    Served,
    Server,
    ServerLostError,
    open_session,
)

JSON = "application/json"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[Server, ClientSession]]:
    """Answer all requests by a function; yield the server, and a session that asks it."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with open_session() as http:
            yield Server("http://{}:{}".format(*runner.addresses[0][:2])), http
    finally:
        await runner.cleanup()


def answering(status: int = 200, **options: Any) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=status, **options)

    return handle


def streaming(*parts: bytes, then: asyncio.Event | None = None) -> Handler:
    """Return a handler that sends these bytes, and ends once an event is set, if there is one."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        if then is not None:
            await then.wait()
        return response

    return handle


def event(*token_ids: int, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "token_ids": token_ids, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def outputs(server: Server, http: ClientSession) -> list[Output]:
    return [output async for output in server.generate(http, {})]


def rests(server: Server) -> bool:
    return 0 < server.rests_until_s - time.monotonic() <= REST_S


async def test_tokens_are_yielded_in_order_and_all_other_lines_are_passed_over() -> None:
    stream = streaming(
        b": a comment\n\n", event(5), b'data: {"usage": {}}\n\n', event(6, 7, finish_reason="stop"),
        b"data: [DONE]\n\n",
    )  # fmt: skip
    async with serving(stream) as (server, http):
        found = await outputs(server, http)
    choices = [each.outputs[0] for each in found]
    assert [tuple(each.token_ids) for each in choices] == [(5,), (6, 7)]
    assert [each.finish_reason for each in choices] == [None, "stop"]


async def test_a_sequence_counts_as_running_until_its_generator_is_closed() -> None:
    async with serving(streaming(event(5), then=asyncio.Event())) as (server, http):
        running = server.generate(http, {})
        await anext(running)
        assert server.num_running == 1
        await running.aclose()
        assert server.num_running == 0


async def test_an_event_may_be_longer_than_a_read_of_the_client() -> None:
    token_ids = tuple(range(100_000, 130_000))
    async with serving(streaming(event(*token_ids))) as (server, http):
        (found,) = await outputs(server, http)
    assert tuple(found.outputs[0].token_ids) == token_ids


async def test_an_event_that_is_cut_off_loses_the_server() -> None:
    async with serving(streaming(event(5), event(6)[:-9])) as (server, http):
        running = server.generate(http, {})
        await anext(running)
        with pytest.raises(ServerLostError, match="cut off"):
            await anext(running)
    assert server.num_running == 0


@pytest.mark.parametrize(
    ("sent", "limit"), [((), "FIRST_TOKEN_S"), ((event(5),), "SILENCE_S")], ids=["first", "later"]
)
async def test_a_silent_server_is_left_after_the_limit_of_its_token(
    sent: tuple[bytes, ...], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_TOKEN_S", "SILENCE_S"):
        monkeypatch.setattr(module, name, 0.05 if name == limit else 3600)
    async with serving(streaming(*sent, then=asyncio.Event())) as (server, http):
        running = server.generate(http, {})
        for _ in sent:
            await anext(running)
        with pytest.raises(TimeoutError):
            await anext(running)


async def test_a_server_that_does_not_begin_to_answer_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FIRST_TOKEN_S", 0.05)

    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError("it is never set")

    async with serving(hang) as (server, http):
        async with asyncio.timeout(10):
            with pytest.raises(TimeoutError):
                await outputs(server, http)
            assert server.num_running == 0


@pytest.mark.parametrize("status", [400, 422])
async def test_a_request_that_is_wrong_for_the_server_fails(status: int) -> None:
    async with serving(answering(status)) as (server, http):
        with pytest.raises(ValueError, match=f"refuses the request .status {status}"):
            await outputs(server, http)


@pytest.mark.parametrize(("status", "has_hint"), [(404, True), (401, False), (503, False)])
async def test_any_other_status_loses_the_server_and_says_what_it_may_lack(
    status: int, has_hint: bool
) -> None:
    async with serving(answering(status, text="why")) as (server, http):
        with pytest.raises(ServerLostError, match=f"status {status}: why") as lost:
            await outputs(server, http)
    assert ("start it with --tokens-only" in str(lost.value)) is has_hint
    assert server.num_running == 0


async def test_no_redirect_takes_the_key_to_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    asked: list[tuple[str, str]] = []

    async def redirect(request: web.Request) -> web.Response:
        asked.append((request.path, request.headers["Authorization"]))
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    async with serving(redirect) as (server, http):
        with pytest.raises(ServerLostError, match="status 307"):
            await outputs(server, http)
        assert not await server.is_well(http)
        assert await asyncio.to_thread(server.ask, "m") is None
    assert asked == [(path, "Bearer secret") for path in (GENERATE, HEALTH, MODELS, MODELS)]


async def test_servers_are_asked_without_the_environment_s_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    told = {"data": [{"id": "m", "max_model_len": 128}], "version": "0.32"}
    async with serving(answering(text=json.dumps(told), content_type=JSON)) as (server, http):
        assert await asyncio.to_thread(server.ask, "m") == Served("m", 128, "0.32")
        assert await server.is_well(http)
    assert server.rests_until_s == 0


UNREADABLE = [
    "<html>",
    "[]",
    "{}",
    '{"data": []}',
    '{"data": [{"id": "m"}], "version": "0.32"}',
    '{"data": [{"id": "m", "max_model_len": 128}]}',
]


@pytest.mark.parametrize("text", UNREADABLE)
async def test_a_server_that_does_not_say_what_it_serves_rests(text: str) -> None:
    async with serving(answering(text=text)) as (server, _):
        assert await asyncio.to_thread(server.ask, "m") is None
    assert rests(server)


@pytest.mark.parametrize("text", UNREADABLE)
async def test_a_server_that_does_not_say_what_it_serves_is_not_well(text: str) -> None:
    async with serving(answering(text=text, content_type=JSON)) as (server, http):
        assert not await server.is_well(http)
    assert rests(server)


async def test_what_speaks_no_http_is_no_server() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as listening:
        server = Server("http://{}:{}".format(*listening.sockets[0].getsockname()))
        assert await asyncio.to_thread(server.ask, "m") is None
        assert rests(server)
        async with open_session() as http:
            assert not await server.is_well(http)


@pytest.mark.parametrize(
    ("status", "help"), [(403, "set VLLM_API_KEY"), (404, "without a path such as /v1")]
)
async def test_a_server_that_will_never_say_is_no_server_of_the_model(
    status: int, help: str
) -> None:
    async with serving(answering(status)) as (server, _):
        with pytest.raises(UnsupportedModelError, match=f"{MODELS} .*status {status}; .*{help}"):
            await asyncio.to_thread(server.ask, "m")
    assert not rests(server)


async def test_a_server_that_is_gone_rests() -> None:
    async with serving(answering()) as (server, http):
        pass
    async with open_session() as http:
        assert not await server.is_well(http)
    assert rests(server)


def test_the_log_probability_of_the_token_itself_is_known_beside_the_best() -> None:
    best = [{"token_id": 5, "logprob": -0.1, "rank": 1}, {"token_id": 7, "logprob": -2.0}]
    own = {"token_id": 9, "logprob": -6.0, "rank": 30, "top_logprobs": best}
    (position,) = Gained.of({"token_ids": [9], "logprobs": {"content": [own]}}).logprobs
    found = {token_id: (each.logprob, each.rank) for token_id, each in position.items()}
    assert found == {5: (-0.1, 1), 7: (-2.0, None), 9: (-6.0, 30)}


@pytest.mark.parametrize("given", [{}, {"logprobs": None}, {"logprobs": {"content": None}}])
def test_a_choice_may_lack_everything(given: dict[str, Any]) -> None:
    assert Gained.of(given) == Gained((), None, None, [])
