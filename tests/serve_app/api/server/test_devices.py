import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from deployments.contract.telemetry.metric_store import Snapshot
from deployments.contract.telemetry.start_progress import StartPhase, StartReport
from deployments.plan.replica_report import LightSleep, ReplicaReport, SleepState
from serve_app.api.server.devices import num_parked_of
from serve_app.backends.models import devices
from serve_app.backends.models.devices import MEMORY_S, DeviceSources
from serve_app.backends.models.serving_states import DeploymentState, ServingState
from serve_app.backends.replicas.replica_reports import Reports
from serve_app.config import AppConfig
from serve_app.http.request_record import RequestRecord
from serve_app.ingress import AppParts, build_app
from serve_app.keys.api_keys import KeyRing
from serve_app.metrics import PARKED, IngressMetrics
from tests.replica_reports import GIB, NOW_S, cpu_report, gpu_report
from tests.serve_app.apps import ALICE, BOB, bearer, client_of, key
from tests.serve_app.fakes import FakeBackend

PATH = "/v1/devices"


START = StartReport("new", StartPhase.DOWNLOADING, NOW_S, NOW_S + 1, 10, 40, 10.0, 1, 3)


@dataclass
class Cluster:
    """Two models, `m` that generates and `c` that classifies; counts the questions."""

    states: dict[str, DeploymentState] = field(default_factory=dict)
    reports: dict[str, Reports] = field(
        default_factory=lambda: {"m": Reports((gpu_report(),), ("gone",), 3)}
    )
    now_s: float = 0.0
    asked: list[tuple[str, bool]] = field(default_factory=list)
    num_starts_read: int = 0
    is_silent: bool = False
    light_sleep_after_s: float | None = None

    async def ask_states(self) -> dict[str, DeploymentState]:
        return self.states

    async def ask(self, model_id: str, is_any_running: bool) -> Reports:
        self.asked.append((model_id, is_any_running))
        await asyncio.sleep(0)
        return self.reports.get(model_id, Reports())

    async def read_starts(self) -> Mapping[str, tuple[StartReport, ...]]:
        self.num_starts_read += 1
        if self.is_silent:
            await asyncio.Event().wait()
        return {"m": (START,)}

    @asynccontextmanager
    async def client(
        self, keys: KeyRing | None = None, host: str | None = "127.0.0.1"
    ) -> AsyncIterator[httpx.AsyncClient]:
        models = [
            {"id": "m", "source": "nowhere", "light_sleep_after_s": self.light_sleep_after_s},
            {
                "id": "c",
                "source": "nowhere",
                "task": "classify",
                "light_sleep_after_s": None,
            },
        ]

        def asks(model_id: str) -> Any:
            return lambda is_any_running: self.ask(model_id, is_any_running)

        sources = DeviceSources(
            {model_id: asks(model_id) for model_id in ("m", "c")},
            lambda: self.now_s,
            self.read_starts,
        )
        parts = AppParts(
            AppConfig.model_validate({"models": models}),
            {"m": FakeBackend()},
            keys=keys,
            host=host,
            ask_states=self.ask_states,
            devices=sources,
        )
        async with client_of(build_app(parts)) as client:
            yield client


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


async def test_each_model_is_shown_with_its_state_and_its_replicas(cluster: Cluster) -> None:
    cluster.states = {
        "m": DeploymentState(ServingState.RUNNING, "UPSCALING", "one more", {"RUNNING": 1}),
        "c": DeploymentState(ServingState.ASLEEP, "HEALTHY"),
    }
    async with cluster.client() as client:
        answer = (await client.get(PATH)).json()
    assert answer["object"] == "list"
    chat, classifier = answer["data"]
    (replica,) = chat.pop("replicas")
    assert chat == {
        "id": "m",
        "object": "model.devices",
        "task": "generate",
        "state": "running",
        "pinned": False,
        "going_to_sleep": False,
        "status": "UPSCALING",
        "message": "one more",
        "num_replicas": {"RUNNING": 1},
        "num_parked": 0,
        "num_started": 3,
        "silent_replicas": ["gone"],
        "starting": [],
    }
    assert cluster.num_starts_read == 0
    assert (classifier["state"], classifier["replicas"]) == ("asleep", [])
    assert cluster.asked == [("m", True), ("c", False)]
    memory = replica["memory"]
    assert memory["use"] == {
        "device_total_bytes": 80 * GIB,
        "device_used_bytes": 70 * GIB,
        "process_bytes": 40 * GIB,
        "allocated_bytes": 36 * GIB,
        "reserved_bytes": 39 * GIB,
        "peak_bytes": 38 * GIB,
        "fragmented_bytes": 3 * GIB,
    }
    (warning,) = memory["warnings"]
    assert (warning["of"], warning["ended_unix_s"]) == ("share", None)
    assert memory["history"]["unix_s"] == [NOW_S, NOW_S + 1, NOW_S + 2]
    assert replica["plan"]["step_bytes"] == GIB
    assert replica["plan"]["measured"] == {
        "weight_bytes": 14 * GIB,
        "captured_bytes": GIB // 4,
        "peak_bytes": 35 * GIB,
        "process_bytes": None,
    }
    assert replica["attention"] == "attention reads extents by length (flash attention)"
    assert replica["work"] == {
        "num_running": 3,
        "num_waiting": 1,
        "kv_usage": 0.25,
        "num_preempted": 2,
        "num_moved_in": 1,
        "num_prompt_tokens": 100,
        "num_cached_tokens": 40,
        "waits": {"by_reason": {"memory": 1}, "longest_s": 2.5, "service_gap_tokens": 120.0},
        "keys": [
            {"key": "alice", "weight": 2.0, "num_waiting": 1, "served_tokens": 900.0},
            {"key": "bob", "weight": 1.0, "num_waiting": 0, "served_tokens": 300.0},
        ],
    }
    assert (replica["state"], replica["state_unix_s"]) == ("healthy", NOW_S)


def in_light_sleep(replica_id: str, state: SleepState) -> ReplicaReport:
    return replace(gpu_report(replica_id), light_sleep=LightSleep(state, NOW_S, 1, level=1))


@pytest.mark.parametrize(
    ("sleeps", "expected"),
    [
        ([SleepState.AWAKE], "running"),
        ([SleepState.FALLING_ASLEEP], "running"),
        ([SleepState.ASLEEP], "asleep"),
        ([SleepState.WAKING], "running"),
        ([SleepState.ASLEEP, SleepState.AWAKE], "running"),
        ([SleepState.ASLEEP, SleepState.ASLEEP], "asleep"),
        ([], "running"),
    ],
)
async def test_a_model_is_asleep_while_all_of_its_replicas_sleep_lightly(
    cluster: Cluster, sleeps: list[SleepState], expected: str
) -> None:
    cluster.light_sleep_after_s = 60
    cluster.states = {"m": DeploymentState(ServingState.RUNNING, "HEALTHY", "", {"RUNNING": 2})}
    found = tuple(in_light_sleep(str(at), state) for at, state in enumerate(sleeps))
    cluster.reports = {"m": Reports(found, ("silent",))}
    async with cluster.client() as client:
        devices = (await client.get(PATH)).json()["data"][0]
        (listed,) = (await client.get("/v1/models")).json()["data"]
        shown = (await client.get("/v1/models/m")).json()
    assert devices["state"] == listed["state"] == shown["state"] == expected
    assert [each["light_sleep"]["state"] for each in devices["replicas"]] == sleeps
    assert [each["light_sleep"]["level"] for each in devices["replicas"]] == [1] * len(sleeps)


async def test_a_list_of_models_that_never_sleep_lightly_asks_no_replica_how_it_is(
    cluster: Cluster,
) -> None:
    cluster.states = {"m": DeploymentState(ServingState.RUNNING)}
    async with cluster.client() as client:
        for path in ("/v1/models", "/v1/models/m"):
            assert (await client.get(path)).status_code == 200
    assert cluster.asked == []


async def test_a_model_that_has_failed_is_not_called_asleep_for_what_its_last_replica_says(
    cluster: Cluster,
) -> None:
    cluster.light_sleep_after_s = 60
    cluster.states = {"m": DeploymentState(ServingState.FAILED)}
    cluster.reports = {"m": Reports((in_light_sleep("r", SleepState.ASLEEP),))}
    async with cluster.client() as client:
        assert (await client.get(PATH)).json()["data"][0]["state"] == "failed"
        (listed,) = (await client.get("/v1/models")).json()["data"]
    assert listed["state"] == "failed"


async def test_what_a_classifier_on_a_cpu_does_not_have_is_null(cluster: Cluster) -> None:
    cluster.reports = {"c": Reports((cpu_report(),))}
    async with cluster.client() as client:
        (replica,) = (await client.get(PATH)).json()["data"][1]["replicas"]
    assert replica["memory"]["use"]["fragmented_bytes"] is None
    assert replica["memory"]["share_bytes"] is None
    assert replica["memory"]["history"]["reserved_bytes"] is None
    assert replica["work"]["kv_usage"] is None


def test_the_streams_that_all_ingresses_hold_are_parked() -> None:
    def ingress(replica: str, **parked: float) -> Snapshot:
        series = tuple(((model,), (number,)) for model, number in parked.items())
        return Snapshot("Ingress", replica, NOW_S, {PARKED.name: series})

    others = Snapshot("m", "r", NOW_S, {})
    found = num_parked_of([ingress("a", m=2, n=0), others, ingress("b", m=3)])
    assert found == {"m": 5, "n": 0}


async def test_a_model_s_parked_streams_are_those_of_its_adapters_too() -> None:
    adapter = {"id": "fine", "source": "nowhere"}
    tuned = {"id": "m", "source": "nowhere", "engine": "vllm", "adapters": [adapter]}
    models = [tuned, {"id": "other", "source": "nowhere"}]
    metrics = IngressMetrics(("m", "fine", "other"))
    parts = AppParts(
        AppConfig.model_validate({"models": models}),
        {"m": FakeBackend()},
        host="127.0.0.1",
        metrics=metrics,
    )
    with ExitStack() as parked:
        for model_id in ("fine", "fine", "m"):
            stream = RequestRecord("r", "POST", lambda: 0.0, 0.0, model=model_id, meter=metrics)
            parked.enter_context(stream.parked())
        async with client_of(build_app(parts)) as client:
            shown = (await client.get(PATH)).json()["data"]
    assert {each["id"]: each["num_parked"] for each in shown} == {"m": 3, "other": 0}


async def test_replicas_are_asked_once_a_second_however_many_clients_look(cluster: Cluster) -> None:
    async with cluster.client() as client:
        answers = await asyncio.gather(*(client.get(PATH) for _ in range(20)))
        assert [each.status_code for each in answers] == [200] * 20
        assert len(cluster.asked) == 2
        cluster.now_s = MEMORY_S
        await client.get(PATH)
    assert len(cluster.asked) == 4


async def test_only_keys_with_the_scope_see_devices(cluster: Cluster) -> None:
    operator = key("alice", ALICE).model_copy(update={"scopes": ("operate",)})
    keys = KeyRing((operator, key("bob", BOB)))
    async with cluster.client(keys) as client:
        allowed = await client.get(PATH, headers=bearer(ALICE))
        refused = await client.get(PATH, headers=bearer(BOB))
        unknown = await client.get(PATH)
    assert (allowed.status_code, refused.status_code, unknown.status_code) == (200, 403, 401)
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("permission_error", "missing_scope")
    assert "Add `scopes: [operate]`" in error["message"]
    assert refused.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 200), ("0.0.0.0", 403), (None, 403)])
async def test_without_keys_only_a_server_on_the_loopback_shows_devices(
    cluster: Cluster, host: str | None, status: int
) -> None:
    async with cluster.client(host=host) as client:
        assert (await client.get(PATH)).status_code == status
    assert bool(cluster.asked) is (status == 200)


async def test_a_replica_that_starts_tells_how_far_it_is(cluster: Cluster) -> None:
    cluster.states = {"m": DeploymentState(ServingState.RUNNING, "UPDATING", "", {"STARTING": 1})}
    async with cluster.client() as client:
        chat, classifier = (await client.get(PATH)).json()["data"]
    assert chat["starting"] == [
        {
            "replica_id": "new",
            "phase": "downloading",
            "phase_unix_s": NOW_S,
            "unix_s": NOW_S + 1,
            "num_bytes": 10,
            "total_bytes": 40,
            "bytes_per_s": 10.0,
            "num_files": 1,
            "total_files": 3,
            "num_tensors": 0,
            "total_tensors": 0,
        }
    ]
    assert classifier["starting"] == []


async def test_a_silent_control_service_delays_the_figures_for_a_moment_only(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "START_TIMEOUT_S", 0.01)
    cluster.is_silent = True
    cluster.states = {"m": DeploymentState(ServingState.RUNNING, "", "", {"STARTING": 1})}
    async with cluster.client() as client:
        chat, _ = (await client.get(PATH)).json()["data"]
    assert chat["starting"] == []
