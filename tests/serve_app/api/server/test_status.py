from importlib.metadata import version

import httpx
import pytest

from deployments.errors import GenerationFailedError
from serve_app.backends.serving_states import DeploymentState, ServingState
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.serve_app.apps import client_of
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


async def test_the_process_is_live_whatever_its_engines_do(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.sickness = GenerationFailedError("the engine has stopped")
    answer = await client.get("/live")
    assert (answer.status_code, answer.json()) == (200, {"status": "live"})


@pytest.mark.parametrize(
    ("down", "status_code", "status"),
    [((), 200, "ready"), (("Ingress", "other"), 200, "ready"), (("m",), 503, "not ready")],
)
async def test_ready_tells_the_state_alone_and_asks_no_model(
    config: AppConfig, backend: FakeBackend, down: tuple[str, ...], status_code: int, status: str
) -> None:
    async def ask() -> dict[str, DeploymentState]:
        return dict.fromkeys(down, DeploymentState(ServingState.DOWN))

    async with client_of(build_app(AppParts(config, {"m": backend}, ask_states=ask))) as c:
        answer = await c.get("/ready")
    assert (answer.status_code, answer.json()) == (status_code, {"status": status})
    assert backend.num_pings == backend.num_describes == 0


async def test_the_version_is_that_of_the_package(client: httpx.AsyncClient) -> None:
    answer = await client.get("/version")
    assert answer.json() == {"version": version("raystream")}
