from importlib.metadata import version

import httpx

from deployments.errors import GenerationFailedError
from tests.serve_app.fakes import FakeBackend


async def test_health_is_ok_while_the_engines_answer(client: httpx.AsyncClient) -> None:
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "models": ["m"]})


async def test_health_names_the_model_whose_engine_failed(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.sickness = GenerationFailedError("the engine has stopped")
    answer = await client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "m: the engine has stopped"


async def test_ready_once_every_model_has_described_itself(client: httpx.AsyncClient) -> None:
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready", "models": ["m"]})


async def test_the_version_is_that_of_the_package(client: httpx.AsyncClient) -> None:
    answer = await client.get("/version")
    assert answer.json() == {"version": version("raystream")}
