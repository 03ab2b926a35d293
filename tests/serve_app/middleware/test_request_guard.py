import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from serve_app.config import LimitsConfig
from tests.serve_app.apps import CHAT, JSON, Client, client_of, make_app, question
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fakes import HELLO, FakeBackend


async def endless(num_pieces: int) -> AsyncIterator[bytes]:
    for _ in range(num_pieces):
        yield b" " * 1024


async def test_a_body_with_too_large_a_content_length_is_refused_unread(client: Client) -> None:
    answer = await client.post(CHAT, content=b" " * 65537, headers=JSON)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-request-id"]


async def test_a_body_without_a_content_length_is_refused_while_it_is_read(client: Client) -> None:
    answer = await client.post(CHAT, content=endless(65), headers=JSON)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


async def test_a_body_of_exactly_the_limit_is_read(client: Client) -> None:
    answer = await client.post(CHAT, content=endless(64), headers=JSON)
    assert "body is empty" in answer.json()["error"]["message"]


@pytest.mark.parametrize("length", ["9" * 5000, "65537"])
async def test_an_absurd_content_length_is_refused(client: Client, length: str) -> None:
    answer = await client.post(CHAT, content=b"{}", headers={**JSON, "content-length": length})
    assert answer.status_code == 413


@pytest.mark.parametrize("header", ["x-request-disconnect-disabled", "X-Request-Timeout-Seconds"])
async def test_a_header_that_controls_ray_serve_is_refused(client: Client, header: str) -> None:
    answer = await client.get("/v1/models", headers={header: "?1"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == header.lower()


async def test_headers_larger_than_the_limit_are_refused_by_name(backend: FakeBackend) -> None:
    async with client_of(make_app(backend, limits={"max_header_bytes": 2000})) as client:
        answer = await client.get("/v1/models", headers={"x-large": "x" * 2000})
        assert answer.status_code == 431
        assert answer.json()["error"]["code"] == "headers_too_large"
        assert "limits.max_header_bytes" in answer.json()["error"]["message"]
        assert (await client.get("/v1/models", headers={"x": "x" * 1000})).status_code == 200


async def test_a_body_that_does_not_come_times_out(backend: FakeBackend) -> None:
    app = make_app(backend, limits={"max_body_read_s": 0.01})
    async with AsgiCall(app, CHAT, body=None, more_body=True) as call:
        await call.end()
    assert call.sent[0]["status"] == 408
    assert b"limits.max_body_read_s" in call.body
    assert backend.requests == []


async def test_the_time_limit_for_the_body_does_not_end_the_answer() -> None:
    backend = FakeBackend([*HELLO[:1], asyncio.Event(), *HELLO[2:]])
    app = make_app(backend, limits={"max_body_read_s": 1e-9})
    async with AsgiCall(app, CHAT, question(stream=True)) as call:
        await call.wait_until(lambda: b"Hello" in call.body)
        event = backend.steps[1]
        assert isinstance(event, asyncio.Event)
        event.set()
        await call.end()
    assert call.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("is_deep", [False, True])
async def test_a_schema_is_refused_by_its_own_limit_long_before_the_body_is_too_deep(
    backend: FakeBackend, is_deep: bool
) -> None:
    schema: dict[str, object] = {}
    for _ in range(LimitsConfig().max_schema_depth - 1 + is_deep):
        schema = {"items": schema}
    named = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    async with client_of(make_app(backend)) as client:
        answer = await client.post(CHAT, json=question(response_format=named))
    assert answer.status_code == (400 if is_deep else 200)
    assert ("limits.max_schema_depth" in answer.text) is is_deep


@pytest.mark.parametrize(("depth", "status"), [(6, 200), (7, 400)])
async def test_json_deeper_than_the_limit_is_refused_by_name(
    backend: FakeBackend, depth: int, status: int
) -> None:
    app = make_app(backend, limits={"max_json_depth": 8})
    nested = "[" * depth + "]" * depth
    body = json.dumps(question(metadata={"a": json.loads(nested)}))
    async with client_of(app) as client:
        answer = await client.post(CHAT, content=body, headers=JSON)
    assert answer.status_code == status
    assert ("limits.max_json_depth" in answer.text) is (status == 400)
