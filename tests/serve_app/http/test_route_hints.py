import json

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from serve_app.http.route_hints import MAX_PATH_LENGTH, route_hint, shown_path
from tests.offenders import for_each
from tests.raw_http import exchange, head, parsed
from tests.serve_app.apps import Client
from tests.serve_app.front_doors import on_uvicorn

CHAT = "POST /v1/chat/completions"
MEANT = {
    "/v1/chat/completions/": CHAT,
    "//v1/chat/completions": CHAT,
    "/v1//chat///completions//": CHAT,
    "/chat/completions": CHAT,
    "/v1/v1/chat/completions": CHAT,
    "/openai/v1/chat/completions": CHAT,
    "/api/chat/completions/": CHAT,
    "/v1/chat/completion": CHAT,
    "/completions": "POST /v1/completions",
    "/v1//models": "GET /v1/models",
    "/v1/models/": "GET /v1/models",
    "/v1/models//": "GET /v1/models",
    "/models": "GET /v1/models",
    "/models/pydoc-chat": "GET /v1/models/{model_id}",
    "/v1/health": "GET /health",
    "/v1/tokenize": "POST /tokenize",
    "/docs/": "GET /docs",
    "/v1/openapi.json": "GET /openapi.json",
}


async def error_of(client: httpx.AsyncClient, method: str, path: str) -> dict[str, str]:
    answer = await client.request(method, f"http://test{path}", json={})
    assert answer.status_code == 404
    assert "location" not in answer.headers
    error: dict[str, str] = answer.json()["error"]
    assert (error["code"], error["type"]) == ("not_found", "invalid_request_error")
    return error


@for_each(*MEANT.items())
async def test_the_404_of_a_slip_names_the_route(path: str, meant: str, client: Client) -> None:
    method = meant.partition(" ")[0]
    error = await error_of(client, method, path)
    assert error["message"] == f"Not Found: {method} {path}. Did you mean {meant}?"


@for_each("/nowhere", "/v1", "/v1/images/generations", "/docs/nothing.js")
async def test_a_path_like_no_route_is_told_where_all_routes_are(path: str, client: Client) -> None:
    error = await error_of(client, "POST" if path != "/docs/nothing.js" else "GET", path)
    assert error["message"].endswith("GET /docs shows all routes.")


async def test_a_wrong_method_is_told_the_right_ones(client: Client) -> None:
    answer = await client.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    message = answer.json()["error"]["message"]
    assert message == "Method Not Allowed: GET /v1/chat/completions. Send POST."


async def test_below_a_route_prefix_the_hint_is_the_same(app: FastAPI) -> None:
    transport = httpx.ASGITransport(app, root_path="/api")
    async with httpx.AsyncClient(transport=transport) as client:
        error = await error_of(client, "POST", "/api/v1/chat/completions/")
    assert error["message"].endswith(f"Did you mean {CHAT}?")


async def test_a_double_slash_reaches_the_application_through_a_socket(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_uvicorn(app, monkeypatch) as port:
        response, body = parsed(await exchange(port, head("GET", "//v1/models")))
    assert response.status_code == 404
    assert json.loads(body)["error"]["message"].endswith("Did you mean GET /v1/models?")


@given(st.text(max_size=2000))
def test_any_path_is_shown_bounded_and_in_plain_characters(path: str) -> None:
    shown = shown_path(path)
    assert len(shown) <= MAX_PATH_LENGTH
    assert shown.isascii()
    assert shown.isprintable()
    assert not set('<>"\\ ') & set(shown)


@given(st.text(max_size=2000))
def test_without_routes_no_path_has_a_hint(path: str) -> None:
    assert route_hint(path, []) is None
