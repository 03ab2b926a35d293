"""What a client meets at the door of `make serve`; without HAProxy only in the soak."""

import json
import re

import httpx
import pytest
from playwright.async_api import Browser

from tests.browser import tab_of
from tests.docs_page import execute_all
from tests.raw_http import exchange, head, parsed, values
from tests.ray.serve_run import Server
from tests.ray.test_serve_run import question
from tests.serve_app.sse_decoder import events_of

pytestmark = pytest.mark.slow

JOBS = ("/v1/files", "/v1/batches", "/v1/responses/")
"""Operations that `make serve` refuses: it keeps no files and no responses."""

SLEEP = "/v1/models/{model_id}/sleep"
"""Refused by `make serve`, too: its models always run."""

STREAMS = {"/v1/chat/completions", "/v1/completions", "/text-generation"}


@pytest.mark.browser
async def test_execute_unchanged_succeeds_on_every_operation_of_the_page(
    server: Server, browser: Browser
) -> None:
    async with tab_of(browser) as tab:
        executed = await execute_all(tab, f"{server.url}/docs", but=(*JOBS, SLEEP))
        assert tab.complaints == []
        assert tab.foreign(server.url, "data:") == []
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


async def test_a_stream_is_chunked_for_http_1_1_alone(server: Server) -> None:
    told = {"model": "pydoc-chat", "messages": question("What is os.path?"), "stream": True}
    body = json.dumps(told).encode()
    for version, encoding in (("1.0", []), ("1.1", [b"chunked"])):
        request = head("POST", "/v1/chat/completions", version, length=len(body)) + body
        response, stream = parsed(await exchange(server.port, request), "POST")
        assert values(response, b"transfer-encoding") == encoding
        assert events_of(stream)[-1] == "[DONE]"


async def test_headers_beyond_our_limit_get_our_431(server: Server) -> None:
    for size in (15_000, 17_000, 20_000, 40_000):
        request = head("GET", "/version", "1.1", b"X-Big: " + b"a" * size)
        response, body = parsed(await exchange(server.port, request))
        assert response.status_code == (200 if size < 16384 else 431), size
        if size > 16384:
            assert json.loads(body)["error"]["code"] == "headers_too_large"


async def test_a_404_names_the_route_that_was_meant(server: Server) -> None:
    for path in ("//v1/chat/completions", "/v1/chat/completions/"):
        response, body = parsed(await exchange(server.port, head("POST", path)))
        assert response.status_code == 404
        told = json.loads(body)["error"]["message"]
        assert told.endswith("Did you mean POST /v1/chat/completions?")


async def test_an_operator_on_this_machine_sees_each_model_s_replica(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        models = (await client.get("/v1/devices")).raise_for_status().json()["data"]
    assert [model["id"] for model in models] == ["pydoc-chat", "pydoc-detector", "pydoc-search"]
    for model in models:
        (replica,) = model["replicas"]
        assert model["num_replicas"] == {"RUNNING": 1}
        assert replica["memory"]["use"]["process_bytes"] > 0
        assert replica["memory"]["history"]["unix_s"]


async def test_a_page_whose_name_was_pointed_at_this_machine_reads_nothing(server: Server) -> None:
    port = server.port
    hosts = {f"evil.example:{port}": 403, f"localhost:{port}": 200, f"host.internal:{port}": 200}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        for host, status in hosts.items():
            answer = await client.get("/v1/models", headers={"host": host})
            assert answer.status_code == status
            assert ("foreign_host" in answer.text) == (status == 403)
