import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx
import pytest

from deployments.contract.errors import ReplicaUnavailableError
from serve_app.backends.models import serving_states
from serve_app.backends.models.operator_actions import Scaling
from serve_app.backends.models.serving_states import DeploymentState, ServingState
from serve_app.backends.replicas.running_replicas import ReplicaFacts, RunningReplicas
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from serve_app.keys.api_keys import KeyRing
from tests.deadline import until
from tests.serve_app.apps import ALICE, BOB, bearer, client_of, key
from tests.serve_app.fakes import FakeBackend
from tests.stopped_clock import settle

ASLEEP = DeploymentState(ServingState.ASLEEP)
RUNNING = DeploymentState(ServingState.RUNNING)
ACTIONS = ("wake", "sleep", "pin", "unpin")


class Sleeper(FakeBackend):
    """A model whose replica runs once it may load and a ping waits for it."""

    def __init__(self, replicas: RunningReplicas) -> None:
        super().__init__(model_id="org/m")
        self.replicas = replicas
        self.may_load = asyncio.Event()
        self.num_pings = 0
        self.failure: ReplicaUnavailableError | None = None

    async def ping(self) -> None:
        self.num_pings += 1
        await self.may_load.wait()
        if self.failure is not None:
            raise self.failure
        self.replicas.replace([ReplicaFacts("r", None)])


@dataclass
class Cluster:
    """Serve with two models, `org/m` that may sleep, and `b`; see `ScalingControl`.

    Attributes:
        pins_too: The deployment that another operator pins while `org/m` is pinned.
    """

    state: DeploymentState = ASLEEP
    scaling: Scaling = field(default_factory=lambda: Scaling(0, has_load_policy=True))
    replicas: RunningReplicas = field(default_factory=RunningReplicas)
    wishes: dict[str, str] = field(default_factory=dict)
    pins_too: str | None = None
    light_sleep_after_s: float | None = None

    def __post_init__(self) -> None:
        self.sleeper = Sleeper(self.replicas)

    def run(self) -> None:
        self.replicas.replace([ReplicaFacts("r", None)])
        self.state = RUNNING

    async def ask_states(self) -> dict[str, DeploymentState]:
        return {"org--m": self.state}

    async def scaling_of(self, deployment: str) -> Scaling:
        assert deployment == "org--m"
        return replace(self.scaling, is_pinned=self.wishes.get(deployment) == "pin")

    async def pin(self, deployment: str) -> None:
        self.wishes[deployment] = "pin"
        self.scaling = replace(self.scaling, pinned_rival=self.pins_too)

    async def end(self, deployment: str) -> bool:
        if self.replicas.has_any:
            self.wishes[deployment] = "sleep"
        return self.replicas.has_any

    async def unpin(self, deployment: str) -> None:
        if self.wishes.get(deployment) == "pin":
            del self.wishes[deployment]

    async def keep(self, deployment: str) -> None:
        if self.wishes.get(deployment) == "sleep":
            del self.wishes[deployment]

    @asynccontextmanager
    async def client(
        self, keys: KeyRing | None = None, host: str | None = "127.0.0.1"
    ) -> AsyncIterator[httpx.AsyncClient]:
        sleeps = {"light_sleep_after_s": self.light_sleep_after_s}
        models = [{"id": "org/m", "source": "nowhere"} | sleeps, {"id": "b", "source": "nowhere"}]
        parts = AppParts(
            AppConfig.model_validate({"models": models}),
            {"org/m": self.sleeper, "b": FakeBackend(model_id="b")},
            replicas={"org/m": self.replicas},
            keys=keys,
            host=host,
            ask_states=self.ask_states,
            scaling=self,
        )
        async with client_of(build_app(parts)) as client:
            yield client


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(serving_states, "MEMORY_S", 0.0)
    return Cluster()


async def act(client: httpx.AsyncClient, action: str) -> httpx.Response:
    return await client.post(f"/v1/models/org/m/{action}")


def told(state: str, *, pinned: bool = False, going_to_sleep: bool = False) -> dict[str, object]:
    return {
        "id": "org/m",
        "object": "model.state",
        "state": state,
        "pinned": pinned,
        "going_to_sleep": going_to_sleep,
    }


async def test_a_model_that_sleeps_is_woken_without_waiting(cluster: Cluster) -> None:
    async with cluster.client() as client:
        answers = [await act(client, "wake") for _ in range(3)]
        assert [each.status_code for each in answers] == [202] * 3
        assert answers[0].json() == told("scaling")
        cluster.sleeper.may_load.set()
        ready = await client.post("/v1/models/org/m/wake?wait=true")
    assert (ready.status_code, ready.json()) == (200, told("running"))
    assert cluster.sleeper.num_pings == 1, "one request is enough to wake it"


@pytest.mark.parametrize("action", ["wake", "pin"])
async def test_a_model_that_may_sleep_lightly_is_woken_although_its_replica_runs(
    cluster: Cluster, action: str
) -> None:
    cluster.light_sleep_after_s = 60
    cluster.sleeper.may_load.set()
    cluster.run()
    async with cluster.client() as client:
        answer = await act(client, action)
        await until(lambda: cluster.sleeper.num_pings == 1)
    expected = told("running", pinned=action == "pin")
    assert (answer.status_code, answer.json()) == (200, expected)


async def test_a_pin_of_a_model_without_a_replica_is_left_to_serve(cluster: Cluster) -> None:
    cluster.light_sleep_after_s = 60
    async with cluster.client() as client:
        assert (await act(client, "pin")).status_code == 202
        await settle()
        assert cluster.sleeper.num_pings == 0, "its next replica starts awake"


async def test_a_start_that_is_waited_for_and_fails_says_why(cluster: Cluster) -> None:
    cluster.sleeper.failure = ReplicaUnavailableError("The weights are damaged.")
    cluster.sleeper.may_load.set()
    async with cluster.client() as client:
        answer = await client.post("/v1/models/org/m/wake?wait=true")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "The weights are damaged."


async def test_a_wake_of_a_model_that_serve_has_given_up_says_why(cluster: Cluster) -> None:
    cluster.state = DeploymentState(ServingState.FAILED, message="The weights are damaged.")
    async with cluster.client() as client:
        answer = await act(client, "wake")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == (
        "The model 'org/m' has failed, and no replica of it runs: The weights are damaged."
    )


async def test_waking_a_model_takes_back_its_sleep_but_no_pin(cluster: Cluster) -> None:
    cluster.run()
    async with cluster.client() as client:
        assert (await act(client, "sleep")).json() == told("running", going_to_sleep=True)
        assert cluster.wishes == {"org--m": "sleep"}
        woken = await act(client, "wake")
        assert (woken.status_code, woken.json()) == (200, told("running"))
        assert cluster.wishes == {}
        await act(client, "pin")
        await act(client, "wake")
    assert cluster.wishes == {"org--m": "pin"}


async def test_a_model_that_runs_goes_to_sleep_later_and_one_that_sleeps_sleeps(
    cluster: Cluster,
) -> None:
    async with cluster.client() as client:
        asleep = await act(client, "sleep")
        cluster.run()
        running = await act(client, "sleep")
    assert (asleep.status_code, asleep.json()) == (200, told("asleep"))
    assert (running.status_code, running.json()) == (202, told("running", going_to_sleep=True))


async def test_a_pinned_model_is_told_and_does_not_sleep_before_it_is_unpinned(
    cluster: Cluster,
) -> None:
    async with cluster.client() as client:
        pinned = await act(client, "pin")
        assert (pinned.status_code, pinned.json()) == (202, told("asleep", pinned=True))
        cluster.run()
        assert (await act(client, "pin")).status_code == 200
        refused = await act(client, "sleep")
        assert refused.status_code == 409
        assert "/v1/models/org/m/unpin first" in refused.json()["error"]["message"]
        for _ in range(2):
            unpinned = await act(client, "unpin")
            assert (unpinned.status_code, unpinned.json()) == (200, told("running"))
        assert (await act(client, "sleep")).status_code == 202


async def test_unpinning_leaves_a_model_that_goes_to_sleep_as_it_is(cluster: Cluster) -> None:
    cluster.run()
    async with cluster.client() as client:
        await act(client, "sleep")
        await act(client, "unpin")
    assert cluster.wishes == {"org--m": "sleep"}


@pytest.mark.parametrize(
    ("scaling", "action", "hint"),
    [
        (Scaling(2, has_load_policy=True), "sleep", "write min_replicas: 0 in the"),
        (Scaling(0), "sleep", "policy_function: deployments.autoscaling:LoadPolicy"),
        (Scaling(0), "pin", "policy_function: deployments.autoscaling:LoadPolicy"),
        (Scaling(0, True, pinned_rival="b"), "pin", "POST /v1/models/b/unpin first"),
    ],
)
async def test_what_a_model_can_not_do_is_a_conflict_that_says_what_to_change(
    cluster: Cluster, scaling: Scaling, action: str, hint: str
) -> None:
    cluster.run()
    cluster.scaling = scaling
    async with cluster.client() as client:
        answer = await act(client, action)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "model_conflict")
    assert hint in error["message"]
    assert cluster.wishes == {}


async def test_of_two_that_take_turns_not_both_are_pinned_at_once(cluster: Cluster) -> None:
    cluster.pins_too = "b"
    async with cluster.client() as client:
        answer = await act(client, "pin")
    assert answer.status_code == 409
    assert "POST /v1/models/b/unpin first" in answer.json()["error"]["message"]
    assert cluster.wishes == {}


async def test_a_model_that_loads_is_not_put_to_sleep(cluster: Cluster) -> None:
    cluster.state = DeploymentState(ServingState.SCALING)
    async with cluster.client() as client:
        answer = await act(client, "sleep")
    assert answer.status_code == 409
    assert "is scaling, and no replica of it runs" in answer.json()["error"]["message"]


async def test_a_model_that_nothing_scales_always_runs(cluster: Cluster) -> None:
    config = AppConfig.model_validate({"models": [{"id": "m", "source": "nowhere"}]})
    app = build_app(AppParts(config, {"m": FakeBackend()}, host="127.0.0.1"))
    async with client_of(app) as client:
        answers = [await client.post(f"/v1/models/m/{action}") for action in ACTIONS]
    assert [each.status_code for each in answers] == [200, 409, 200, 200]


@pytest.mark.parametrize("action", ACTIONS)
async def test_an_unknown_model_is_not_found(cluster: Cluster, action: str) -> None:
    async with cluster.client() as client:
        answer = await client.post(f"/v1/models/x/{action}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("action", ACTIONS)
async def test_only_keys_with_the_scope_act(cluster: Cluster, action: str) -> None:
    operator = key("alice", ALICE).model_copy(update={"scopes": ("operate",)})
    cluster.run()
    path = f"/v1/models/org/m/{action}"
    async with cluster.client(KeyRing((operator, key("bob", BOB)))) as client:
        refused = await client.post(path, headers=bearer(BOB))
        unknown = await client.post(path)
        assert cluster.wishes == {}
        allowed = await client.post(path, headers=bearer(ALICE))
    assert (refused.status_code, unknown.status_code) == (403, 401)
    assert refused.json()["error"]["code"] == "missing_scope"
    assert allowed.is_success


@pytest.mark.parametrize("action", ACTIONS)
async def test_without_keys_only_this_machine_acts_and_no_page_of_another_site(
    cluster: Cluster, action: str
) -> None:
    cluster.run()
    path = f"/v1/models/org/m/{action}"
    async with cluster.client(host="0.0.0.0") as client:
        assert (await client.post(path)).status_code == 403
    async with cluster.client() as client:
        foreign = await client.post(path, headers={"Origin": "https://evil.example"})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "foreign_origin")
        assert cluster.wishes == {}
        own = await client.post(path, headers={"Origin": str(client.base_url)})
    assert own.is_success
