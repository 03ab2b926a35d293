import asyncio
from collections.abc import Sequence

import pytest

from deployments.contract.telemetry.metric_store import Series, Snapshot
from serve_app.backends.models.snapshots import (
    ALONE_S,
    MEMORY_S,
    IngressReport,
    ModelSource,
    Snapshots,
)
from serve_app.backends.replicas.running_replicas import ReplicaFacts, RunningReplicas

GENERATED = "vllm_generation_tokens_total"
RUNNING = "vllm_num_requests_running"


class Now:
    """A monotonic clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Model:
    """A model's replicas: some run, and some of them answer."""

    def __init__(self) -> None:
        self.replicas = RunningReplicas()
        self.answers: list[Snapshot] = []
        self.num_asked = 0

    @property
    def source(self) -> ModelSource:
        return ModelSource(self._ask, self.replicas)

    async def _ask(self) -> Sequence[object]:
        self.num_asked += 1
        await asyncio.sleep(0)
        return self.answers

    def run(self, *replica_ids: str) -> None:
        self.replicas.replace(ReplicaFacts(each, "node") for each in replica_ids)


def taken(replica: str, num_tokens: float = 0, num_running: float = 0, at_s: float = 0) -> Snapshot:
    series: dict[str, tuple[Series, ...]] = {
        GENERATED: ((("m",), (num_tokens,)),),
        RUNNING: ((("m",), (num_running,)),),
    }
    return Snapshot("m", replica, at_s, series)


def ingress(replica: str = "own") -> Snapshot:
    return Snapshot("Ingress", replica, 0.0, {})


def shown(snapshots: Sequence[Snapshot], name: str) -> dict[str, float]:
    """Return a metric's number for each replica of the model."""
    return {each.replica: each.series[name][0][1][0] for each in snapshots if each.series}


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def snapshots(model: Model, now: Now) -> Snapshots:
    return Snapshots(ingress, {"m": model.source}, now_s=now)


async def test_each_live_replica_and_ingress_has_its_own_series(model: Model, now: Now) -> None:
    async def ask() -> Sequence[object]:
        return [IngressReport(ingress(name), {}) for name in ("own", "other")]

    model.run("a", "b")
    model.answers = [taken("b", 2), taken("a", 1)]
    found = await Snapshots(ingress, {"m": model.source}, ask, now).all()
    assert [(each.deployment, each.replica) for each in found] == [
        ("Ingress", "other"),
        ("Ingress", "own"),
        ("m", "a"),
        ("m", "b"),
    ]
    assert shown(found, GENERATED) == {"a": 1, "b": 2}


async def test_an_answer_is_passed_on_for_a_second_however_many_ask(
    snapshots: Snapshots, model: Model, now: Now
) -> None:
    model.run("a")
    model.answers = [taken("a", 1)]
    answers = await asyncio.gather(*(snapshots.all() for _ in range(5)))
    now.seconds += MEMORY_S / 2
    assert await snapshots.all() is answers[0]
    assert model.num_asked == 1
    now.seconds += MEMORY_S
    model.answers = [taken("a", 2)]
    assert shown(await snapshots.all(), GENERATED) == {"a": 2}


async def test_a_replica_that_does_not_answer_in_time_is_shown_as_it_was(
    snapshots: Snapshots, model: Model, now: Now
) -> None:
    model.run("a", "b")
    model.answers = [taken("a", 1, 3), taken("b", 2)]
    await snapshots.all()
    now.seconds += MEMORY_S
    model.answers = [taken("b", 5)]
    found = await snapshots.all()
    assert shown(found, GENERATED) == {"a": 1, "b": 5}
    assert shown(found, RUNNING) == {"a": 3, "b": 0}


async def test_a_replica_that_is_gone_is_not_shown_while_others_run(
    snapshots: Snapshots, model: Model, now: Now
) -> None:
    model.run("a", "b")
    model.answers = [taken("a", 1), taken("b", 2)]
    await snapshots.all()
    now.seconds += MEMORY_S
    model.run("b")
    model.answers = [taken("b", 3)]
    assert shown(await snapshots.all(), GENERATED) == {"b": 3}


async def test_without_replicas_the_last_ones_are_shown_without_load_and_nothing_is_woken(
    snapshots: Snapshots, model: Model, now: Now
) -> None:
    model.run("a")
    model.answers = [taken("a", 7, num_running=4)]
    await snapshots.all()
    for _ in range(2):
        now.seconds += MEMORY_S
        model.run()
        found = await snapshots.all()
        assert shown(found, GENERATED) == {"a": 7}
        assert shown(found, RUNNING) == {"a": 0}
    assert model.num_asked == 1
    now.seconds += MEMORY_S
    model.run("b")
    model.answers = [taken("b", 1, 1)]
    found = await snapshots.all()
    assert shown(found, GENERATED) == {"b": 1}
    assert shown(found, RUNNING) == {"b": 1}


async def test_ingresses_show_the_same_last_state(model: Model, now: Now) -> None:
    other = Model()
    asked_last = Snapshots(ingress, {"m": model.source}, now_s=now)
    model.run("a")
    model.answers = [taken("a", 9, at_s=20.0)]
    await asked_last.all()
    assert asked_last.report().remembered == {}, "it runs"
    model.run()

    async def ask() -> Sequence[object]:
        return [asked_last.report()]

    asked_before = Snapshots(lambda: ingress("second"), {"m": other.source}, ask, now)
    assert shown(await asked_before.all(), GENERATED) == {"a": 9}
    older = Snapshots(lambda: ingress("third"), {"m": other.source}, ask, now)
    older._last["m"] = (taken("a", 8, at_s=10.0),)
    assert shown(await older.all(), GENERATED) == {"a": 9}
    newer = Snapshots(lambda: ingress("fourth"), {"m": other.source}, ask, now)
    newer._last["m"] = (taken("a", 10, at_s=30.0),)
    assert shown(await newer.all(), GENERATED) == {"a": 10}


async def test_an_ingress_without_others_looks_for_them_only_now_and_then(now: Now) -> None:
    reports = [IngressReport(ingress(), {})]
    num_asked = 0

    async def ask() -> Sequence[object]:
        nonlocal num_asked
        num_asked += 1
        return reports

    snapshots = Snapshots(ingress, {}, ask, now)
    for _ in range(5):
        assert len(await snapshots.all()) == 1
        now.seconds += MEMORY_S
    assert num_asked == 1
    reports.append(IngressReport(ingress("other"), {}))
    now.seconds += ALONE_S
    for num_times in (2, 3, 4):
        assert len(await snapshots.all()) == 2
        assert num_asked == num_times
        now.seconds += MEMORY_S
