"""Two models behind one door: each surface asks the one that is named."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from serve_app.config import AppConfig
from serve_app.ingress import build_app
from tests.serve_app.fakes import FakeBackend, FakeClock
from tests.serve_app.test_ingress import openapi

NAMES = ("small", "org/Large-7B")
MESSAGES = [{"role": "user", "content": "hi"}]
SURFACES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/text-generation", {"prompt": "hi"}),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [1]}),
]


@pytest.fixture
def backends() -> dict[str, FakeBackend]:
    return {name: FakeBackend(model_id=name) for name in NAMES}


@pytest.fixture
async def client(
    config: AppConfig, backends: Mapping[str, FakeBackend]
) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(config, backends, FakeClock()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("path", "body"), SURFACES)
async def test_the_model_that_is_named_answers(
    client: httpx.AsyncClient,
    backends: Mapping[str, FakeBackend],
    path: str,
    body: dict[str, Any],
    name: str,
) -> None:
    assert (await client.post(path, json={**body, "model": name})).status_code == 200
    assert {id_ for id_ in NAMES if backends[id_].num_calls} == {name}


@pytest.mark.parametrize(("path", "body"), SURFACES)
async def test_an_unknown_model_is_not_found_and_those_that_are_there_are_named(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer = await client.post(path, json={**body, "model": "smal"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert all(name in error["message"] for name in NAMES)


@pytest.mark.parametrize("path", ["/v1/models/x", "/v1/models/org", "/v1/models/"])
async def test_an_unknown_model_can_not_be_shown(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert answer.status_code == 404
    assert all(name in answer.json()["error"]["message"] for name in NAMES)


@pytest.mark.parametrize("path", ["org/Large-7B", "org%2FLarge-7B"])
async def test_a_name_with_a_slash_is_found_however_it_is_written(
    client: httpx.AsyncClient, path: str
) -> None:
    assert (await client.get(f"/v1/models/{path}")).json()["id"] == "org/Large-7B"


async def test_the_document_names_the_models(client: httpx.AsyncClient) -> None:
    schemas = (await openapi(client))["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == list(NAMES)
    kinds = schemas["TokenizeBody"]["properties"]["model"]["anyOf"]
    assert [kind.get("enum") for kind in kinds] == [list(NAMES), None]
