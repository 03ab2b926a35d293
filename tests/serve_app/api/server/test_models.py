import asyncio
from dataclasses import replace
from typing import Any

import pytest

from deployments.contract.descriptions import Footprint
from deployments.contract.sampling_params import SamplingParams
from serve_app.api.requests.context import ApiContext
from serve_app.api.server.models import ModelsApi
from serve_app.backends.models.catalog import ModelCatalog
from serve_app.backends.models.serving_states import DEPLOY_FAILED, DeploymentState, ServingState
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.serve_app.apps import Client, client_of
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
    "state": "running",
    "pinned": False,
    "failure": None,
    "max_model_len": 128,
    "accepts_images": True,
    "has_chat_template": True,
    "labels": None,
    "default_sampling": {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": None,
    },
    "engine": "raystream",
    "exact": None,
    "footprint": None,
}


async def test_models_are_listed(client: Client) -> None:
    answer = await client.get("/v1/models")
    assert answer.json() == {"object": "list", "data": [CARD]}


async def test_one_model_is_shown(client: Client) -> None:
    assert (await client.get("/v1/models/m")).json() == CARD


async def test_a_model_whose_name_has_a_slash_is_found(config: AppConfig) -> None:
    app = build_app(AppParts(config, {"org/m": FakeBackend(model_id="org/m")}))
    async with client_of(app) as client:
        assert (await client.get("/v1/models/org/m")).json()["id"] == "org/m"


async def test_the_root_is_the_repository_whose_tokenizer_clients_may_load(client: Client) -> None:
    client.backend.description = replace(client.backend.description, root="org/model")
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["root"]) == ("m", "org/model")


async def test_a_base_model_says_that_it_only_continues_texts(client: Client) -> None:
    client.backend.description = replace(client.backend.description, has_chat_template=False)
    assert (await client.get("/v1/models/m")).json()["has_chat_template"] is False


async def test_an_unknown_model_is_not_found(client: Client) -> None:
    answer = await client.get("/v1/models/x")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_a_model_tells_its_size_its_device_and_its_defaults(client: Client) -> None:
    client.backend.description = replace(
        client.backend.description,
        default_sampling=SamplingParams(temperature=0.7, top_k=20),
        default_max_tokens=100,
        footprint=Footprint(3_000_000, 6_000_000, "bfloat16", "A GPU"),
    )
    (card,) = (await client.get("/v1/models")).json()["data"]
    default = card["default_sampling"]
    assert (default["temperature"], default["top_k"], default["max_tokens"]) == (0.7, 20, 100)
    assert card["footprint"] == {
        "num_parameters": 3_000_000,
        "weight_bytes": 6_000_000,
        "dtype": "bfloat16",
        "device": "A GPU",
    }


@pytest.mark.parametrize("exact", [False, True])
async def test_a_model_on_vllm_says_whether_its_texts_depend_on_those_beside_them(
    client: Client, exact: bool
) -> None:
    client.backend.description = replace(client.backend.description, engine="vllm", is_exact=exact)
    card = (await client.get("/v1/models/m")).json()
    assert (card["engine"], card["exact"]) == ("vllm", exact)


async def test_a_model_whose_replicas_do_not_answer_is_listed_as_down(config: AppConfig) -> None:
    silent = FakeBackend(model_id="n")
    silent.loaded = asyncio.Event()
    catalog = ModelCatalog({"m": FakeBackend(), "n": silent}, probe_timeout_s=0.01)
    api = ModelsApi(ApiContext(catalog, config.limits, FakeClock()))
    listed = (await api.list_models()).data
    assert [(card.id, card.state) for card in listed] == [("m", "running"), ("n", "down")]
    assert (listed[1].created, listed[1].root, listed[1].max_model_len) == (0, "n", None)
    silent.loaded.set()
    assert (await api.list_models()).data[1].state == "running"
    silent.loaded = asyncio.Event()  # what was told once is still told
    lost = (await api.list_models()).data[1]
    assert (lost.state, lost.max_model_len) == ("down", 128)


async def test_a_model_that_loads_or_has_failed_is_listed_and_not_asked(config: AppConfig) -> None:
    states = {"m": DeploymentState(ServingState.DOWN)}
    backend = FakeBackend()

    async def ask() -> dict[str, DeploymentState]:
        return states

    parts = AppParts(config, {"m": backend}, ask_states=ask)
    async with client_of(build_app(parts)) as client:
        (loading,) = (await client.get("/v1/models")).json()["data"]
    states["m"] = DeploymentState(ServingState.FAILED, DEPLOY_FAILED, "a.SomeError: no such folder")
    async with client_of(build_app(parts)) as client:
        (failed,) = (await client.get("/v1/models")).json()["data"]
    assert (loading["state"], loading["failure"]) == ("down", None)
    assert (failed["state"], failed["failure"]) == ("failed", "no such folder")
    assert backend.num_describes == 0


async def test_a_model_with_an_odd_description_leaves_the_others_in_the_list(
    config: AppConfig,
) -> None:
    odd: Any = (0, 1)
    broken = FakeClassifier()
    broken.description = replace(broken.description, id="c", labels=odd)
    app = build_app(AppParts(config, {"m": FakeBackend()}, {"c": broken}))
    async with client_of(app) as client:
        answer = await client.get("/v1/models")
    assert [card["id"] for card in answer.json()["data"]] == ["m"]
