"""Two models in one application: each surface asks the named one."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.serve_app.apps import AppClient, client_of
from tests.serve_app.fakes import FakeBackend, FakeClock
from tests.serve_app.test_ingress import openapi

NAMES = ("small", "org/Large-7B")
MESSAGES = [{"role": "user", "content": "hi"}]
SURFACES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/text-generation", {"prompt": "hi"}),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [1]}),
]
NAMING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Routes whose answers name the model, whole and streamed."""


@pytest.fixture
def backends() -> dict[str, FakeBackend]:
    return {name: FakeBackend(model_id=name) for name in NAMES}


@pytest.fixture
async def client(
    config: AppConfig, backends: Mapping[str, FakeBackend]
) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(build_app(AppParts(config, backends, clock=FakeClock()))) as client:
        yield client


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("path", "body"), SURFACES)
async def test_the_named_model_answers(
    client: AppClient,
    backends: Mapping[str, FakeBackend],
    path: str,
    body: dict[str, Any],
    name: str,
) -> None:
    assert (await client.post(path, json={**body, "model": name})).status_code == 200
    assert {id_ for id_ in NAMES if backends[id_].num_calls} == {name}


@pytest.mark.parametrize("omitted", [{}, {"model": None}])
@pytest.mark.parametrize(("path", "body"), SURFACES)
async def test_without_a_name_the_first_model_that_generates_answers_and_says_so(
    client: AppClient,
    backends: Mapping[str, FakeBackend],
    path: str,
    body: dict[str, Any],
    omitted: dict[str, Any],
) -> None:
    answer = await client.post(path, json={**body, **omitted})
    assert answer.status_code == 200
    assert {id_ for id_ in NAMES if backends[id_].num_calls} == {NAMES[0]}
    if path in NAMING:
        assert answer.json()["model"] == NAMES[0]


@pytest.mark.parametrize("path", NAMING)
async def test_a_stream_without_a_name_says_which_model_answers(
    client: AppClient, path: str
) -> None:
    answer = await client.post(path, json={**dict(SURFACES)[path], "stream": True})
    assert answer.status_code == 200
    assert f'"model":"{NAMES[0]}"' in answer.text.replace(" ", "")


@pytest.mark.parametrize(("path", "body"), SURFACES)
async def test_an_unknown_model_is_not_found_and_the_error_names_the_served_ones(
    client: AppClient, path: str, body: dict[str, Any]
) -> None:
    error = await client.refused(path, {**body, "model": "smal"}, 404)
    assert all(name in error["message"] for name in NAMES)
    if not path.startswith("/v1/messages"):  # Anthropic's errors have neither
        assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("path", ["/v1/models/x", "/v1/models/org"])
async def test_an_unknown_model_can_not_be_shown(client: AppClient, path: str) -> None:
    answer = await client.get(path)
    assert answer.status_code == 404
    assert all(name in answer.json()["error"]["message"] for name in NAMES)


async def test_the_list_with_a_slash_at_its_end_is_not_found_but_named(client: AppClient) -> None:
    answer = await client.get("/v1/models/")
    assert answer.status_code == 404
    assert "GET /v1/models" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["org/Large-7B", "org%2FLarge-7B"])
async def test_a_name_with_a_slash_is_found_plain_and_escaped(client: AppClient, path: str) -> None:
    assert (await client.get(f"/v1/models/{path}")).json()["id"] == "org/Large-7B"


async def test_the_document_names_the_models(client: AppClient) -> None:
    schemas = (await openapi(client))["components"]["schemas"]
    for body in ("ChatRequest", "TokenizeBody"):
        kinds = schemas[body]["properties"]["model"]["anyOf"]
        assert [kind.get("enum") for kind in kinds] == [list(NAMES), None]
