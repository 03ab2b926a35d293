import asyncio
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.serve_app.apps import ALICE, Client, bearer, make_app, ring
from tests.serve_app.asgi_socket import RESPONSES, AsgiSocket
from tests.serve_app.fakes import HELLO, FakeBackend


async def test_a_handshake_needs_a_key(backend: FakeBackend) -> None:
    app = make_app(backend, ring())
    for headers in ({}, bearer("sk-of-nobody-000000")):
        async with AsgiSocket(app, headers=headers) as socket:
            status, body = socket.denial
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            names = {name for name, _ in socket.sent[0]["headers"]}
            assert {b"www-authenticate", b"x-request-id"} <= names
    async with AsgiSocket(app, headers=bearer(ALICE)) as socket:
        assert socket.sent[0]["type"] == "websocket.accept"
        assert b"x-request-id" in {name.lower() for name, _ in socket.sent[0]["headers"]}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nowhere", 404),
        ("/responses", 404),
        ("/v1/chat/completions", 405),
        ("/v1/models", 426),
        ("/health", 426),
    ],
)
async def test_no_other_path_is_spoken(app: FastAPI, path: str, status: int) -> None:
    async with AsgiSocket(app, path) as socket:
        assert socket.denial[0] == status


async def test_a_stream_without_an_end_is_left(app: FastAPI) -> None:
    num_sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while num_sent < 10_000:  # which nothing waits for
            num_sent += 1
            yield b"a piece"
            await asyncio.sleep(0)

    app.router.add_api_route("/stream", lambda: StreamingResponse(pieces()), response_model=None)
    async with AsgiSocket(app, "/stream") as socket:
        assert socket.denial[0] == 426
    assert num_sent < 100


async def test_other_paths_need_a_key_first(backend: FakeBackend) -> None:
    async with AsgiSocket(make_app(backend, ring()), "/nowhere") as socket:
        assert socket.denial[0] == 401


async def test_headers_are_bounded(app: FastAPI) -> None:
    async with AsgiSocket(app, headers={"x-big": "a" * 20_000}) as socket:
        assert socket.denial[0] == 431
    async with AsgiSocket(app, headers={"x-request-timeout-seconds": "1"}) as socket:
        assert socket.denial[0] == 400


async def test_a_page_of_another_site_may_not_connect(app: FastAPI) -> None:
    async with AsgiSocket(app, headers={"origin": "http://elsewhere.example"}) as socket:
        status, body = socket.denial
        assert (status, body["error"]["code"]) == (403, "foreign_origin")


async def test_without_sockets_codex_is_told_to_ask_by_http(backend: FakeBackend) -> None:
    async with AsgiSocket(make_app(backend, limits={"max_sockets": 0})) as socket:
        status, body = socket.denial
        assert (status, body["error"]["code"]) == (426, "upgrade_required")


async def test_a_server_without_the_extension_refuses_by_closing(app: FastAPI) -> None:
    async with AsgiSocket(app, "/nowhere", extensions=()) as socket:
        assert socket.sent == [{"type": "websocket.close", "code": 1008}]


async def test_a_place_is_free_again_when_its_connection_has_ended(backend: FakeBackend) -> None:
    app = make_app(backend, limits={"max_sockets": 1})
    for _ in range(2):
        async with AsgiSocket(app) as socket:
            assert socket.sent[0]["type"] == "websocket.accept"
            async with AsgiSocket(app) as second:
                assert second.denial[0] == 426
            socket.leave()
            await socket.end()


async def test_a_plain_get_is_told_to_upgrade(client: Client) -> None:
    answer = await client.get(RESPONSES)
    assert answer.status_code == 426
    assert answer.json()["error"]["code"] == "upgrade_required"
    assert answer.headers["x-should-retry"] == "false"


async def test_other_methods_are_told_both(client: Client) -> None:
    answer = await client.delete(RESPONSES)
    assert answer.status_code == 405


async def test_an_ingress_that_ends_closes_connections_between_turns(
    config: AppConfig, backend: FakeBackend
) -> None:
    release, stopping = asyncio.Event(), asyncio.Event()

    async def is_stopping() -> bool:
        await stopping.wait()
        return True

    backend.steps = [HELLO[0], release, *HELLO[1:]]
    app = build_app(AppParts(config, {"m": backend}, is_stopping=is_stopping))
    async with (
        app.router.lifespan_context(app),
        AsgiSocket(app) as busy,
        AsgiSocket(app) as idle,
    ):
        for stream in ("main", "side", "main"):
            busy.create(input="hi", stream_id=stream)
        await busy.wait_until(lambda: sum("delta" in event for event in busy.events) == 2)
        stopping.set()
        await idle.end()
        assert idle.close_code == 1012
        async with AsgiSocket(app) as late:
            assert late.denial[0] == 503
        release.set()
        await busy.end()
        assert busy.close_code == 1012
        ends = [each["stream_id"] for each in busy.events if each["type"] == "response.completed"]
        assert sorted(ends) == ["main", "side"]
        assert len(backend.requests) == 2
