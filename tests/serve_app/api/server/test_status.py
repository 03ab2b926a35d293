from importlib.metadata import version
from typing import Any

import pytest
from fastapi import FastAPI

from deployments.contract.errors import GenerationFailedError
from serve_app.backends.models.devices import DeviceSources
from serve_app.backends.models.serving_states import DEPLOY_FAILED, DeploymentState, ServingState
from serve_app.backends.replicas.replica_reports import Reports
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.replica_reports import cpu_report
from tests.serve_app.apps import Client, client_of
from tests.serve_app.fakes import FakeBackend


async def test_health_is_ok_while_the_engines_answer(client: Client) -> None:
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "models": ["m"]})


async def test_health_names_the_model_whose_engine_failed(client: Client) -> None:
    client.backend.sickness = GenerationFailedError("the engine has stopped")
    answer = await client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "m: the engine has stopped"


async def test_the_process_is_live_whatever_its_engines_do(client: Client) -> None:
    client.backend.sickness = GenerationFailedError("the engine has stopped")
    answer = await client.get("/live")
    assert (answer.status_code, answer.json()) == (200, {"status": "live"})


@pytest.mark.parametrize(
    ("states", "is_ready"),
    [
        ({}, False),  # no news is no replica
        ({"m": ServingState.RUNNING, "Ingress": ServingState.DOWN}, True),
        ({"m": ServingState.ASLEEP}, True),
        ({"m": ServingState.SCALING}, True),
        ({"m": ServingState.DOWN}, False),
        ({"m": ServingState.FAILED}, False),
    ],
)
async def test_ready_tells_the_state_alone_and_asks_no_engine(
    config: AppConfig, backend: FakeBackend, states: dict[str, ServingState], is_ready: bool
) -> None:
    async with client_of(app_in(config, backend, states)) as c:
        answer = await c.get("/ready")
    expected = (200, {"status": "ready"}) if is_ready else (503, {"status": "not ready"})
    assert (answer.status_code, answer.json()) == expected
    assert backend.num_pings == backend.num_describes == 0


@pytest.mark.parametrize(
    ("reports", "is_ready"),
    [
        (Reports((cpu_report(),)), True),
        (Reports((cpu_report(),), silent=("hangs",)), True),
        (Reports(silent=("hangs",)), False),
        (Reports(), False),  # the controller has not noticed yet that it is dead
    ],
)
async def test_a_model_that_runs_is_ready_while_a_replica_of_it_answers(
    config: AppConfig, backend: FakeBackend, reports: Reports, is_ready: bool
) -> None:
    async def ask(is_any_running: bool) -> Reports:
        return reports

    states = {"m": ServingState.RUNNING}
    async with client_of(app_in(config, backend, states, devices=DeviceSources({"m": ask}))) as c:
        assert (await c.get("/ready")).is_success == is_ready


@pytest.mark.parametrize("later", [ServingState.ASLEEP, ServingState.SCALING])
@pytest.mark.parametrize("silent", [(), ("stops",)])
async def test_a_model_whose_last_replica_was_stopped_a_moment_ago_is_ready(
    config: AppConfig, backend: FakeBackend, later: ServingState, silent: tuple[str, ...]
) -> None:
    states = {"m": ServingState.RUNNING}

    async def ask(is_any_running: bool) -> Reports:
        states["m"] = later
        return Reports(silent=silent)

    async with client_of(app_in(config, backend, states, devices=DeviceSources({"m": ask}))) as c:
        assert (await c.get("/ready")).is_success


async def test_a_model_whose_first_replica_no_router_knows_yet_is_ready_once_one_does(
    config: AppConfig, backend: FakeBackend
) -> None:
    known = [Reports(), Reports((cpu_report(),))]

    async def ask(is_any_running: bool) -> Reports:
        return known.pop(0)

    states = {"m": ServingState.RUNNING}
    async with client_of(app_in(config, backend, states, devices=DeviceSources({"m": ask}))) as c:
        assert (await c.get("/ready")).is_success


@pytest.mark.parametrize(
    ("concerns_file", "told"), [(False, "m: it is gone; n: it is gone"), (True, "it is gone")]
)
async def test_health_tells_of_a_deploy_that_failed_while_earlier_replicas_serve(
    backend: FakeBackend, concerns_file: bool, told: str
) -> None:
    models = [{"id": id_, "source": "nowhere"} for id_ in ("m", "n")]
    state = DeploymentState(
        ServingState.RUNNING, DEPLOY_FAILED, "a.SomeError: it is gone", concerns_file=concerns_file
    )

    async def ask() -> dict[str, DeploymentState]:
        return {"m": state, "n": state}

    parts = AppParts(
        AppConfig.model_validate({"models": models}), {"m": backend, "n": backend}, ask_states=ask
    )
    async with client_of(build_app(parts)) as c:
        assert (await c.get("/ready")).status_code == 200
        answer = await c.get("/health")
    expected = {"status": "ok", "models": ["m", "n"], "failed_deploy": told}
    assert (answer.status_code, answer.json()) == (200, expected)


def app_in(
    config: AppConfig, backend: FakeBackend, states: dict[str, ServingState], **parts: Any
) -> FastAPI:
    """Return the application while the controller tells these states."""

    async def ask() -> dict[str, DeploymentState]:
        return {name: DeploymentState(state) for name, state in states.items()}

    return build_app(AppParts(config, {"m": backend}, ask_states=ask, **parts))


async def test_the_version_is_that_of_the_package(client: Client) -> None:
    answer = await client.get("/version")
    assert answer.json() == {"version": version("raystream")}
