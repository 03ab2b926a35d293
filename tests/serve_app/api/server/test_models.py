import asyncio
from dataclasses import replace
from typing import Any

import httpx

from serve_app.api.intake.context import ApiContext
from serve_app.api.server.models import ModelsApi
from serve_app.backends.catalog import ModelCatalog
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.serve_app.fake_pooler import FakeClassifier
from tests.serve_app.fakes import FakeBackend, FakeClock

CARD = {
    "id": "m",
    "object": "model",
    "created": 1_700_000_000,
    "owned_by": "raystream",
    "root": "m",
    "parent": None,
    "task": "generate",
    "max_model_len": 128,
    "accepts_images": True,
    "labels": None,
}


async def test_models_are_listed(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models")
    assert answer.json() == {"object": "list", "data": [CARD]}


async def test_one_model_is_shown(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models/m")).json() == CARD


async def test_a_model_whose_name_has_a_slash_is_found(config: AppConfig) -> None:
    app = build_app(AppParts(config, {"org/m": FakeBackend(model_id="org/m")}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        assert (await client.get("/v1/models/org/m")).json()["id"] == "org/m"


async def test_the_root_is_the_repository_whose_tokenizer_clients_may_load(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.description = replace(backend.description, root="org/model")
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["root"]) == ("m", "org/model")


async def test_an_unknown_model_is_not_found(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models/x")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_a_loading_model_is_not_listed(config: AppConfig) -> None:
    loading = FakeBackend(model_id="n")
    loading.loaded = asyncio.Event()
    catalog = ModelCatalog({"m": FakeBackend(), "n": loading}, probe_timeout_s=0.01)
    listed = await ModelsApi(ApiContext(catalog, config.limits, FakeClock())).list_models()
    assert [card.id for card in listed.data] == ["m"]


async def test_a_model_with_an_odd_description_leaves_the_others_in_the_list(
    config: AppConfig,
) -> None:
    odd: Any = (0, 1)
    broken = FakeClassifier()
    broken.description = replace(broken.description, id="c", labels=odd)
    app = build_app(AppParts(config, {"m": FakeBackend()}, {"c": broken}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        answer = await client.get("/v1/models")
    assert [card["id"] for card in answer.json()["data"]] == ["m"]
