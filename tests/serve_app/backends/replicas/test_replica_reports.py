import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from serve_app.backends.replicas.replica_reports import HandleReports, Reports
from serve_app.backends.replicas.running_replicas import ReplicaFacts, RunningReplicas
from tests.replica_reports import cpu_report, gpu_report
from tests.stopped_clock import Clock, settle, stop_clock

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

TIMEOUT_S = 2.0


class Call:
    """A call to one replica: an answer, an error, or silence."""

    def __init__(self, answer: object = None) -> None:
        self._answer = answer
        self.is_cancelled = False

    async def get_async(self) -> object:
        if self._answer is None:
            await asyncio.Event().wait()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """Serve's handle, as far as `broadcast` goes."""

    def __init__(self, calls: Sequence[Call] | Exception | None) -> None:
        self._calls = calls
        self.num_broadcasts = 0

    def broadcast(self, method: str) -> "Handle":
        assert method == "inspect"
        self.num_broadcasts += 1
        return self

    async def _fetch_replica_results_async(self) -> Sequence[Call]:
        if self._calls is None:
            await asyncio.Event().wait()
        if isinstance(self._calls, Exception):
            raise self._calls
        return cast("Sequence[Call]", self._calls)


def reports_of(handle: Handle, *running: str) -> HandleReports:
    replicas = RunningReplicas()
    replicas.replace(ReplicaFacts(each, None) for each in running)
    return HandleReports(cast("DeploymentHandle[Any]", handle), replicas, TIMEOUT_S)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clock(monkeypatch)


async def test_each_replica_s_report_is_returned() -> None:
    handle = Handle([Call(gpu_report("b")), Call(cpu_report("a"))])
    found = await reports_of(handle, "a", "b").ask(True)
    assert found == Reports((cpu_report("a"), gpu_report("b")), (), 2)


async def test_replicas_that_are_silent_or_dead_are_named(clock: Clock) -> None:
    calls = [Call(gpu_report("a")), Call(), Call(ActorDiedError()), Call(asyncio.CancelledError())]
    asking = asyncio.ensure_future(reports_of(Handle(calls), "a", "b", "c", "d").ask(True))
    await settle()
    assert not asking.done()
    clock(TIMEOUT_S)
    found = await asking
    assert found == Reports((gpu_report("a"),), ("b", "c", "d"), 4)
    assert [call.is_cancelled for call in calls] == [False, True, False, False]


async def test_a_router_that_is_not_ready_is_not_waited_for(clock: Clock) -> None:
    asking = asyncio.ensure_future(reports_of(Handle(None), "a").ask(True))
    await settle()
    clock(TIMEOUT_S)
    assert await asking == Reports((), ("a",), 1)


async def test_a_model_without_a_replica_is_not_asked() -> None:
    handle = Handle([])
    assert await reports_of(handle).ask(False) == Reports()
    assert handle.num_broadcasts == 0


async def test_of_controller_and_router_either_may_know_of_a_replica_first() -> None:
    gone = Handle(DeploymentUnavailableError(DeploymentID(name="m")))
    assert await reports_of(gone).ask(True) == Reports()
    new = Handle([Call(gpu_report("a"))])
    assert (await reports_of(new, "a").ask(False)).reports == (gpu_report("a"),)
    assert (gone.num_broadcasts, new.num_broadcasts) == (1, 1)


def test_replicas_are_counted_once_however_often_they_are_told() -> None:
    replicas = RunningReplicas()
    for running in ("a", "ab", "b", "", "b", "bc"):
        replicas.replace(ReplicaFacts(each, None) for each in running)
    assert (replicas.num_seen, replicas.ids) == (3, frozenset("bc"))
