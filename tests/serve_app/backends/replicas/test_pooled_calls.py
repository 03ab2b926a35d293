"""Pooled requests on their way through channels, to replicas' real servers in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from deployments.channel.server import ChannelServer
from deployments.contract.claims import Claim
from deployments.contract.errors import (
    OverloadedError,
    PoolingFailedError,
    ReplicaUnavailableError,
)
from deployments.contract.generation import Refused, Started
from deployments.contract.pooling import (
    Asleep,
    CallAddress,
    Pooled,
    PooledText,
    PoolingAnswer,
    PoolingEvent,
    PoolingRequest,
)
from deployments.contract.pooling_wire import MAX_CALL_BYTES
from serve_app.backends.replicas import pooled_calls, token_channels
from serve_app.backends.replicas.handle_backend import HandleBackend
from serve_app.backends.replicas.replica_errors import ReplicaStoppedError
from serve_app.backends.replicas.running_replicas import ReplicaFacts, RunningReplicas
from serve_app.backends.streams.failover import Failover
from serve_app.backends.streams.retries import FailoverLimits
from serve_app.http.request_record import CURRENT_RECORD, RequestRecord
from tests.offenders import for_each
from tests.serve_app.backends.replicas.test_refusals import full
from tests.serve_app.fake_pooler import as_row
from tests.stopped_clock import settle, stop_clock

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

REQUEST = PoolingRequest("r", ("hi",))
TEXTS = (PooledText(as_row((0.25, 0.75)), 3),)

pytestmark = [pytest.mark.in_time, pytest.mark.usefixtures("advance")]


class Replica:
    """A classifier's replica, which answers when it is let."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.channels = ChannelServer("127.0.0.1")
        self.channels.take_calls(self.pool)
        self.is_scaled_by_calls = False
        self.requests: list[PoolingRequest] = []
        self.num_served = 0  # requests that came as Serve's calls
        self.num_running = 0
        self.refusal: Refused | None = None
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.is_between_turns = False
        self._is_in_turn = False

    async def pool(self, request: PoolingRequest) -> PoolingAnswer:
        self.requests.append(request)
        if self.is_between_turns and not self._is_in_turn:
            return Asleep(self.name)
        if self.refusal is not None:
            return self.refusal
        self.num_running += 1
        try:
            await self.may_answer.wait()
        finally:
            self.num_running -= 1
        if self.error is not None:
            raise self.error
        return Pooled(TEXTS, self.name)

    async def pool_in_turn(self, request: PoolingRequest) -> AsyncIterator[list[PoolingEvent]]:
        with self.channels.go_aheads.expect() as go_ahead:
            yield [Started(await self.channels.address(), go_ahead.number)]
            assert await go_ahead.is_given()
        self._is_in_turn = True
        yield [await self.pool(request)]
        self._is_in_turn = False

    async def call_address(self) -> CallAddress:
        address = None if self.is_scaled_by_calls else await self.channels.address()
        return CallAddress(self.name, address)

    def drop(self) -> None:
        """End the connections as a process does that is killed."""
        for connection in list(self.channels._connections.values()):
            connection._transport.abort()


class BroadcastCall:
    """One replica's part of a call to all."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def get_async(self) -> object:
        return await self._replica.call_address()

    def cancel(self) -> None:
        pass


class Broadcast:
    """A call to all replicas."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    async def _fetch_replica_results_async(self) -> list[BroadcastCall]:
        return [BroadcastCall(each) for each in self._replicas]


class Responses:
    """A suspect's call."""

    def __init__(self, events: AsyncIterator[list[PoolingEvent]]) -> None:
        self._events = events

    def __aiter__(self) -> "Responses":
        return self

    async def __anext__(self) -> list[PoolingEvent]:
        return await anext(self._events)

    def cancel(self) -> None:
        pass


class Method:
    def __init__(self, remote: Callable[[PoolingRequest], object]) -> None:
        self.remote = remote


class Model:
    """Serve's handle of a model: its calls go to the last of its replicas."""

    def __init__(self, *names: str) -> None:
        self.replicas = [Replica(name) for name in names]
        self.silent: set[str] = set()
        self.num_broadcasts = 0
        self.running = RunningReplicas()
        self.run(*names)

    def run(self, *names: str) -> None:
        """Say which replicas run."""
        self.running.replace(ReplicaFacts(name, name) for name in names)

    def options(self, method_name: str, stream: bool) -> Method:
        assert stream
        return Method(lambda request: Responses(self.replicas[-1].pool_in_turn(request)))

    def broadcast(self, method: str) -> Broadcast:
        assert method == "call_address"
        self.num_broadcasts += 1
        return Broadcast([each for each in self.replicas if each.name not in self.silent])

    @property
    def pool(self) -> Method:
        def served(request: PoolingRequest) -> object:
            self.replicas[-1].num_served += 1
            return asyncio.ensure_future(self.replicas[-1].pool(request))

        return Method(served)

    @property
    def num_served(self) -> int:
        """Requests that were Serve's calls."""
        return sum(each.num_served for each in self.replicas)

    @property
    def num_asked(self) -> int:
        """All requests."""
        return sum(len(each.requests) for each in self.replicas)


@asynccontextmanager
async def backend_of(model: Model) -> AsyncIterator[HandleBackend]:
    backend = HandleBackend(cast("DeploymentHandle[Any]", model), model.running)
    try:
        yield backend
    finally:
        await backend.aclose()
        for each in model.replicas:
            each.channels.close()


async def connected(backend: HandleBackend, model: Model) -> None:
    """Send a request, which is Serve's call, and wait until the channels stand."""
    num_before = model.num_served
    await backend.send(REQUEST)
    assert model.num_served == num_before + 1
    await until(lambda: backend._calls._asking is None)
    for each in model.replicas:
        each.num_served = 0
        each.requests.clear()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the fakes announce no changes
        await asyncio.sleep(0)


async def test_the_first_request_is_serve_s_call_and_the_others_take_the_channel() -> None:
    model = Model("a")
    async with backend_of(model) as backend:
        await connected(backend, model)
        answers = await asyncio.gather(*(backend.send(REQUEST) for _ in range(20)))
        assert answers == [TEXTS] * 20
        assert (model.num_asked, model.num_served, model.num_broadcasts) == (20, 0, 1)
        assert len(model.replicas[0].channels._connections) == 1


async def test_what_the_replica_has_to_know_travels_with_a_request() -> None:
    model = Model("a")
    record = RequestRecord("r", "POST", now=lambda: 12.5, started_s=10.0)
    mine = replace(REQUEST, claim=Claim(priority=2, tenant="mine", weight=3.0))
    async with backend_of(model) as backend:
        await connected(backend, model)
        token = CURRENT_RECORD.set(record)
        try:
            for _ in range(2):
                await backend.send(mine)
        finally:
            CURRENT_RECORD.reset(token)
        claim = replace(mine.claim, ingress=backend._channels.channel_id)
        assert model.replicas[0].requests == [
            replace(mine, elapsed_s=2.5, claim=replace(claim, num_served=served, backlog=backlog))
            for served, backlog in ((0, 2), (3, 3))
        ]


async def test_a_request_goes_to_the_less_busy_replica() -> None:
    model = Model("a", "b")
    busy, idle = model.replicas
    async with backend_of(model) as backend:
        await connected(backend, model)
        for each in model.replicas:
            each.may_answer.clear()
        asked = [asyncio.ensure_future(backend.send(REQUEST)) for _ in range(8)]
        await until(lambda: model.num_asked == 8)
        assert busy.num_running == idle.num_running == 4
        idle.may_answer.set()
        await until(lambda: sum(each.done() for each in asked) == 4)
        asked += [asyncio.ensure_future(backend.send(REQUEST)) for _ in range(3)]
        await until(lambda: sum(each.done() for each in asked) == 7)
        assert busy.num_running == 4
        busy.may_answer.set()
        await asyncio.gather(*asked)


async def fill_by_others(
    model: Model, others: HandleBackend, backend: HandleBackend
) -> list[asyncio.Future[Any]]:
    """Let three calls of another ingress run at the first replica, and this one hear of them."""
    busy = model.replicas[0]
    busy.may_answer.clear()
    model.run("a")
    asked: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(others.send(REQUEST)) for _ in range(3)
    ]
    await until(lambda: busy.num_running == 3)
    busy.refusal = full("a")
    with pytest.raises(OverloadedError):
        await backend.send(REQUEST)
    busy.refusal = None
    return asked


async def test_the_load_of_other_ingresses_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("a", "b")
    async with backend_of(model) as others, backend_of(model) as backend:
        await connected(others, model)
        await connected(backend, model)
        stop_clock(monkeypatch)
        asked = await fill_by_others(model, others, backend)
        model.run("a", "b")
        for each in model.replicas:
            each.may_answer.clear()
        asked += [asyncio.ensure_future(backend.send(REQUEST)) for _ in range(3)]
        await until(lambda: model.num_asked == 7)
        assert [each.num_running for each in model.replicas] == [3, 3]
        for each in model.replicas:
            each.may_answer.set()
        await asyncio.gather(*asked)


async def test_a_replica_that_was_busy_once_gets_requests_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model("a", "b")
    busy = model.replicas[0]
    async with backend_of(model) as others, backend_of(model) as backend:
        await connected(others, model)
        await connected(backend, model)
        move = stop_clock(monkeypatch)
        asked = await fill_by_others(model, others, backend)
        busy.may_answer.set()
        await asyncio.gather(*asked)
        model.run("a", "b")
        busy.requests.clear()
        for _ in range(20):
            await backend.send(REQUEST)
        assert busy.requests == []  # by what it has told, it is still busy
        move(token_channels.OTHERS_S)
        for _ in range(100):
            await backend.send(REQUEST)
        assert busy.requests


async def test_a_replica_without_a_channel_gets_its_part_by_serve_s_calls() -> None:
    model = Model("a", "b")
    model.silent = {"b"}
    async with backend_of(model) as backend:
        await connected(backend, model)
        for _ in range(3):
            await backend.send(REQUEST)
        assert model.num_served == 3


async def test_replicas_that_have_not_said_where_they_listen_are_asked_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model("a", "b")
    model.silent = {"b"}
    async with backend_of(model) as backend:
        await connected(backend, model)
        move = stop_clock(monkeypatch)
        await backend.send(REQUEST)
        await settle()
        assert model.num_broadcasts == 1
        move(pooled_calls.ASK_INTERVAL_S)
        model.silent = set()
        await connected(backend, model)
        assert model.num_broadcasts == 2
        await backend.send(REQUEST)
        assert model.num_served == 0


async def test_a_new_replica_is_asked_at_once() -> None:
    model = Model("a", "b")
    model.run("a")
    model.silent = {"b"}
    async with backend_of(model) as backend:
        await connected(backend, model)
        model.silent = set()
        model.run("a", "b")
        await connected(backend, model)
        await asyncio.gather(*(backend.send(REQUEST) for _ in range(4)))
        assert [len(each.requests) for each in model.replicas] == [2, 2]
        assert model.num_served == 0


async def test_a_replica_that_another_policy_scales_by_serve_s_calls_gets_only_those() -> None:
    model = Model("a")
    model.replicas[0].is_scaled_by_calls = True
    async with backend_of(model) as backend:
        await connected(backend, model)
        for _ in range(3):
            await backend.send(REQUEST)
        assert (model.num_served, model.num_broadcasts) == (3, 1)


async def test_a_replica_that_can_t_be_reached_gets_serve_s_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model("a")
    async with backend_of(model) as backend:
        address = await model.replicas[0].channels.address()
        await until(lambda: model.replicas[0].channels._listening is not None)
        stranger = replace(address, secret=b"another")
        monkeypatch.setattr(
            Replica, "call_address", lambda self: _answered(CallAddress("a", stranger))
        )
        await connected(backend, model)
        await backend.send(REQUEST)
        assert model.num_served == 1


async def _answered(address: CallAddress) -> CallAddress:
    return address


async def test_a_request_that_is_too_large_is_serve_s_call() -> None:
    model = Model("a")
    async with backend_of(model) as backend:
        await connected(backend, model)
        large = replace(REQUEST, texts=("x" * MAX_CALL_BYTES,))
        assert await backend.send(large) == TEXTS
        assert model.num_served == 1
        assert await backend.send(REQUEST) == TEXTS
        assert model.num_served == 1


async def test_a_client_that_leaves_cancels_its_request_and_no_other() -> None:
    model = Model("a")
    (replica,) = model.replicas
    async with backend_of(model) as backend:
        await connected(backend, model)
        replica.may_answer.clear()
        leaving, staying = (asyncio.ensure_future(backend.send(REQUEST)) for _ in range(2))
        await until(lambda: replica.num_running == 2)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await until(lambda: replica.num_running == 1)
        replica.may_answer.set()
        assert await staying == TEXTS
        assert model.num_served == 0


async def test_refusals_come_with_the_shortest_wait_after_as_many_attempts_as_replicas() -> None:
    model = Model("a", "b")
    async with backend_of(model) as backend:
        await connected(backend, model)
        for each in model.replicas:
            each.refusal = full(each.name, 4)
        model.replicas[0].refusal = full("a", 9)
        with pytest.raises(OverloadedError, match="full") as caught:
            await backend.send(REQUEST)
        assert caught.value.retry_after_s == 4
        assert model.num_asked == 2
        assert model.num_served == 0


async def test_a_replica_that_refuses_is_not_asked_again_though_it_is_less_busy() -> None:
    model = Model("a", "b")
    idle, busy = model.replicas
    async with backend_of(model) as backend:
        await connected(backend, model)
        busy.may_answer.clear()
        idle.refusal = full("a")
        asked = [asyncio.ensure_future(backend.send(REQUEST)) for _ in range(4)]
        await until(lambda: busy.num_running == 4)
        busy.may_answer.set()
        assert await asyncio.gather(*asked) == 4 * [TEXTS]
        assert model.num_served == 0


async def test_an_error_of_the_replica_is_raised() -> None:
    model = Model("a")
    async with backend_of(model) as backend:
        await connected(backend, model)
        model.replicas[0].error = PoolingFailedError("failed")
        with pytest.raises(PoolingFailedError, match="failed"):
            await backend.send(REQUEST)


async def test_requests_fail_when_the_replica_is_killed_while_it_computes() -> None:
    model = Model("a")
    (replica,) = model.replicas
    async with backend_of(model) as backend:
        await connected(backend, model)
        replica.may_answer.clear()
        asked = [asyncio.ensure_future(backend.send(REQUEST)) for _ in range(3)]
        await until(lambda: replica.num_running == 3)
        replica.drop()
        for each in asked:
            with pytest.raises(ReplicaUnavailableError) as caught:
                await each
            assert not isinstance(caught.value, ReplicaStoppedError)  # it may have killed it
        await until(lambda: replica.num_running == 0)
        replica.may_answer.set()
        await connected(backend, model)  # as Serve's call; it is asked again
        assert await backend.send(REQUEST) == TEXTS
        assert model.num_served == 0


async def test_a_request_fails_when_the_replica_is_killed_as_it_is_sent() -> None:
    model = Model("a")
    (replica,) = model.replicas
    async with backend_of(model) as backend:
        await connected(backend, model)
        asked = asyncio.ensure_future(backend.send(REQUEST))
        replica.drop()
        with pytest.raises(ReplicaUnavailableError):
            await asked
        assert not replica.requests


async def test_a_request_whose_answer_is_cut_off_fails() -> None:
    model = Model("a")
    (replica,) = model.replicas
    async with backend_of(model) as backend:
        await connected(backend, model)
        (connection,) = replica.channels._connections.values()
        write = connection._transport.write

        def write_half(data: bytes) -> None:
            write(data[: len(data) // 2])
            connection._transport.close()

        assert connection._calls is not None
        connection._calls._send = write_half
        with pytest.raises(ReplicaUnavailableError):
            await backend.send(REQUEST)
        assert len(replica.requests) == 1


async def test_a_replica_that_is_frozen_is_lost_and_the_others_get_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model("a", "b")
    frozen, other = model.replicas
    async with backend_of(model) as backend:
        await connected(backend, model)
        frozen.may_answer.clear()
        model.run("a")
        asked = asyncio.ensure_future(backend.send(REQUEST))
        await until(lambda: frozen.num_running == 1)
        model.run("a", "b")
        model.silent = {"a"}
        channel = backend._calls._by_replica["a"]
        assert channel is not None
        for _ in range(token_channels.MAX_NUM_SILENT_TICKS + 1):
            channel.tick()
        with pytest.raises(ReplicaUnavailableError):
            await asked
        await asyncio.gather(*(backend.send(REQUEST) for _ in range(3)))
        assert len(other.requests) == 3
        assert model.num_served == 0


async def test_a_replica_that_leaves_finishes_what_it_has_and_gets_no_more() -> None:
    model = Model("a", "b")
    leaving, other = model.replicas
    async with backend_of(model) as backend:
        await connected(backend, model)
        leaving.may_answer.clear()
        model.run("a")
        asked = asyncio.ensure_future(backend.send(REQUEST))
        await until(lambda: leaving.num_running == 1)
        model.run("b")
        assert await backend.send(REQUEST) == TEXTS
        assert (len(leaving.requests), len(other.requests)) == (1, 1)
        assert leaving.channels.calls is not None
        ended = asyncio.ensure_future(leaving.channels.calls.ended())
        await settle()
        assert not ended.done()
        leaving.may_answer.set()
        await ended
        leaving.channels.close()
        assert await asked == TEXTS


async def test_a_replica_that_stops_before_it_has_answered_did_not_die_of_the_request() -> None:
    model = Model("a")
    (replica,) = model.replicas
    async with backend_of(model) as backend:
        await connected(backend, model)
        replica.may_answer.clear()
        asked = asyncio.ensure_future(backend.send(REQUEST))
        await until(lambda: replica.num_running == 1)
        replica.channels.close()
        with pytest.raises(ReplicaStoppedError):
            await asked


@for_each("killed", "stopped")
async def test_another_replica_answers_what_was_lost_and_only_the_killed_one_s_is_a_suspect(
    how: str,
) -> None:
    model = Model("a", "b")
    lost, other = model.replicas
    async with backend_of(model) as backend:
        await connected(backend, model)
        failover = Failover(backend, FailoverLimits(timeout_s=10.0, first_backoff_s=0.0))
        lost.may_answer.clear()
        model.run("a")
        asked = asyncio.ensure_future(failover.send(REQUEST))
        await until(lambda: lost.num_running == 1)
        model.run("b")
        if how == "killed":
            lost.drop()
        else:
            lost.channels.close()
        assert await asked == TEXTS
        assert [each.num_deaths for each in other.requests] == [int(how == "killed")]


async def test_a_request_whose_model_has_no_turn_leaves_the_channel_and_waits_in_serve_s_call() -> (
    None
):
    model = Model("a")
    async with backend_of(model) as backend:
        await connected(backend, model)
        (replica,) = model.replicas
        replica.is_between_turns = True
        assert await backend.send(REQUEST) == TEXTS
        assert (len(replica.requests), model.num_served) == (2, 0)
        replica.is_between_turns = False
        assert await backend.send(REQUEST) == TEXTS
        assert (len(replica.requests), model.num_served) == (3, 0)
