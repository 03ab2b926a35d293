import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from serve_app.config import AppConfig
from serve_app.http.request_id import chosen_id
from serve_app.ingress import AppParts, build_app
from serve_app.middleware.server_edge import with_replica, with_valid_id, without_chunks
from tests.raw_http import exchange, head, parsed, values
from tests.serve_app.apps import CHAT, question
from tests.serve_app.fakes import FakeBackend, FakeClock
from tests.serve_app.front_doors import behind_haproxy, on_uvicorn
from tests.serve_app.sse_decoder import events_of

REFUSED = [b"x" * 65, b"a b", b"a.b", b"\xc3\xa9", b"<script>", b"\xff\xfe", b""]


@pytest.fixture
def app(config: AppConfig, backend: FakeBackend, clock: FakeClock) -> FastAPI:
    """Return the application as the ingress builds it."""
    return build_app(AppParts(config, {"m": backend}, clock=clock, serve_echoes_id=True))


@pytest.fixture(params=["uvicorn", pytest.param("haproxy", marks=pytest.mark.slow)])
async def port(
    request: pytest.FixtureRequest, app: FastAPI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[int]:
    async with on_uvicorn(app, monkeypatch) as port:
        if request.param == "uvicorn":
            yield port
        else:
            async with behind_haproxy(port, tmp_path) as front:
                yield front


def post(version: str, **fields: object) -> bytes:
    body = json.dumps(question(**fields)).encode()
    return head("POST", CHAT, version, length=len(body)) + body


async def test_a_valid_id_comes_back_once(port: int) -> None:
    answer = await exchange(port, head("GET", "/version", "1.1", b"X-Request-Id: mine-1"))
    assert values(parsed(answer)[0], b"x-request-id") == [b"mine-1"]


@pytest.mark.parametrize("path", ["/version", "/nowhere", "/v1/models/nothing"])
async def test_a_refused_id_is_replaced_and_the_new_one_comes_back_once(
    port: int, path: str
) -> None:
    for refused in REFUSED:
        answer = await exchange(port, head("GET", path, "1.1", b"X-Request-Id: " + refused))
        (found,) = values(parsed(answer)[0], b"x-request-id")
        assert re.fullmatch(b"[0-9a-f]{32}", found), refused
        assert not refused or refused not in answer


async def test_of_two_ids_the_first_comes_back(port: int) -> None:
    lines = b"X-Request-Id: one", b"X-Request-Id: two"
    answer = await exchange(port, head("GET", "/version", "1.1", *lines))
    assert values(parsed(answer)[0], b"x-request-id") == [b"one"]


async def test_a_stream_to_an_http_1_0_client_ends_with_the_connection(port: int) -> None:
    response, body = parsed(await exchange(port, post("1.0", stream=True)), "POST")
    assert response.status_code == 200
    assert not values(response, b"transfer-encoding")
    assert not values(response, b"content-length")
    assert body.startswith(b"data: ")
    assert events_of(body)[-1] == "[DONE]"


async def test_a_stream_to_an_http_1_1_client_is_chunked(port: int) -> None:
    response, body = parsed(await exchange(port, post("1.1", stream=True)), "POST")
    assert values(response, b"transfer-encoding") == [b"chunked"]
    assert events_of(body)[-1] == "[DONE]"


@pytest.mark.parametrize("request_", [post("1.0"), head("GET", "/v1/models", "1.0")])
async def test_a_whole_answer_to_an_http_1_0_client_keeps_its_length(
    port: int, request_: bytes
) -> None:
    response, body = parsed(await exchange(port, request_))
    assert values(response, b"content-length") == [b"%d" % len(body)]
    assert json.loads(body)


async def test_head_of_http_1_0_is_answered_without_a_body(port: int) -> None:
    response, body = parsed(await exchange(port, head("HEAD", "/version", "1.0")), "HEAD")
    assert (response.status_code, body) == (200, b"")


@pytest.mark.parametrize("size", [15_000, 17_000, 20_000, 40_000])
async def test_headers_beyond_our_limit_get_our_431(port: int, size: int) -> None:
    answer = await exchange(port, head("GET", "/version", "1.1", b"X-Big: " + b"a" * size))
    response, body = parsed(answer)
    assert response.status_code == (200 if size < 16384 else 431)
    if size > 16384:
        assert json.loads(body)["error"]["code"] == "headers_too_large"


NAMES = st.sampled_from([b"x-request-id", b"x-request-ids", b"accept"])


@given(st.lists(st.tuples(NAMES, st.binary(max_size=80))))
def test_any_headers_keep_all_but_their_ids(headers: list[tuple[bytes, bytes]]) -> None:
    mended = with_valid_id(headers)
    others = [header for header in headers if header[0] != b"x-request-id"]
    assert [header for header in mended if header[0] != b"x-request-id"] == others
    ids = [value.decode() for name, value in mended if name == b"x-request-id"]
    assert len(ids) == (len(others) < len(headers))
    assert all(chosen_id(id_) == id_ for id_ in ids)


async def test_another_server_s_send_is_left_as_it_is(backend: FakeBackend) -> None:
    async def send(message: Message) -> None:
        raise NotImplementedError

    assert without_chunks(send) is send


async def test_only_the_answer_to_a_health_check_names_the_replica() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    for status in (200, 401, 404):
        start: Message = {"type": "http.response.start", "status": status, "headers": []}
        await with_replica(send, b"me")(start)
    named = [message["status"] for message in sent if message["headers"]]
    assert named == [200]
