"""What a client meets at the door of `make serve`, in both of Serve's modes."""

import json
import re

import pytest

from tests.browser import CHROMIUM, opened_tab
from tests.docs_page import execute_all
from tests.raw_http import exchange, head, parsed, values
from tests.ray.serve_run import Server
from tests.ray.test_serve_run import question
from tests.serve_app.sse_decoder import events_of

pytestmark = pytest.mark.slow

STREAMS = {"/v1/chat/completions", "/v1/completions", "/text-generation"}


@pytest.fixture
def server(shipped_server: Server) -> Server:
    return shipped_server


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
async def test_execute_unchanged_succeeds_on_every_operation_of_the_page(
    server: Server,
) -> None:
    async with opened_tab() as tab:
        executed = await execute_all(tab, f"{server.url}/docs")
        assert tab.complaints == []
        # A picture in an answer is a blob.
        assert tab.foreign(server.url, "data:", f"blob:{server.url}") == []
    assert {each.path for each in executed} >= STREAMS | {"/v1/models/{model_id}", "/v1/classify"}
    failed = [each for each in executed if not 200 <= each.status < 300]
    assert failed == []
    for each in executed:
        own = ["503"] if each.path == "/ready" else []
        assert each.documented == ["200", *own, "default"]
        assert "curl -N -X" in each.curl
        assert ("data: [DONE]" in each.shown) == (each.path in STREAMS)


async def test_a_refused_id_is_replaced_and_the_new_one_comes_back_once(server: Server) -> None:
    for path in ("/version", "/nowhere"):
        request = head("GET", path, "1.1", b"X-Request-Id: not ours")
        (found,) = values(parsed(await exchange(server.port, request))[0], b"x-request-id")
        assert re.fullmatch(b"[0-9a-f]{32}", found)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_is_chunked_for_http_1_1_alone(server: Server, version: str) -> None:
    told = {"model": "pydoc-chat", "messages": question("What is os.path?"), "stream": True}
    body = json.dumps(told).encode()
    request = head("POST", "/v1/chat/completions", version, length=len(body)) + body
    response, stream = parsed(await exchange(server.port, request), "POST")
    chunked = [b"chunked"] if version == "1.1" else []
    assert values(response, b"transfer-encoding") == chunked
    assert events_of(stream)[-1] == "[DONE]"


@pytest.mark.parametrize("size", [15_000, 17_000, 20_000, 40_000])
async def test_headers_beyond_our_limit_get_our_431(server: Server, size: int) -> None:
    request = head("GET", "/version", "1.1", b"X-Big: " + b"a" * size)
    response, body = parsed(await exchange(server.port, request))
    assert response.status_code == (200 if size < 16384 else 431)
    if size > 16384:
        assert json.loads(body)["error"]["code"] == "headers_too_large"


@pytest.mark.parametrize("path", ["//v1/chat/completions", "/v1/chat/completions/"])
async def test_a_404_names_the_route_that_was_meant(server: Server, path: str) -> None:
    response, body = parsed(await exchange(server.port, head("POST", path)))
    assert response.status_code == 404
    assert json.loads(body)["error"]["message"].endswith("Did you mean POST /v1/chat/completions?")
