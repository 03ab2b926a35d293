import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any, cast

import pytest
from ray.exceptions import ActorDiedError

from deployments.channel import go_ahead
from deployments.channel.server import ChannelServer
from deployments.contract.claims import Claim
from deployments.contract.descriptions import PoolerDescription
from deployments.contract.errors import (
    ContextLengthExceededError,
    OverloadedError,
    ReplicaUnavailableError,
)
from deployments.contract.generation import Refused, Started, Waking
from deployments.contract.pooling import (
    Asleep,
    Pooled,
    PooledText,
    PoolingAnswer,
    PoolingEvent,
    PoolingRequest,
)
from raystream.local_handle import LocalHandle
from serve_app.backends.replicas.backend import DescribeRequest, PingRequest
from serve_app.backends.replicas.handle_backend import MAX_LOST_ASLEEP, HandleBackend
from serve_app.backends.replicas.refusals import MAX_ATTEMPTS
from serve_app.backends.replicas.replica_errors import (
    LostAfterStartError,
    LostAsleepError,
    ReplicaStoppedError,
)
from serve_app.http.request_record import CURRENT_RECORD, RequestRecord
from tests.offenders import for_each
from tests.serve_app.backends.replicas.test_handles import (
    ERRORS,
    FakeMethod,
    FakeResponse,
    FakeResponses,
    dual_error,
)
from tests.serve_app.backends.replicas.test_refusals import full, running
from tests.serve_app.fake_pooler import as_row
from tests.stopped_clock import settle

pytestmark = pytest.mark.in_time


if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

REQUEST = PoolingRequest("r", ("hi",))
ANSWER = (PooledText(as_row((0.25, 0.75)), 3),)
DESCRIPTION = PoolerDescription("c", 1, 8, ("a", "b"), False)


class FakeHandle:
    """The part of `DeploymentHandle` that the backend uses; calls get these answers in turn."""

    def __init__(self, *answers: object) -> None:
        self.calls: list[FakeResponse] = []
        self.suspects = FakeResponses()
        self._answers = cycle(answers)
        self.describe = FakeMethod(FakeResponse(DESCRIPTION))

    def options(self, method_name: str, stream: bool) -> FakeMethod:
        assert stream
        return FakeMethod(self.suspects)

    @property
    def pool(self) -> FakeMethod:
        self.calls.append(FakeResponse(next(self._answers)))
        return FakeMethod(self.calls[-1])

    @property
    def ping(self) -> FakeMethod:
        return self.pool


def backend(*answers: object) -> tuple[HandleBackend, FakeHandle]:
    """Return a model with replicas "a", "b" and so on, as many as answers, which come in turn."""
    fake = FakeHandle(*answers)
    handle = cast("DeploymentHandle[Any]", fake)
    return HandleBackend(handle, running(*"abcdefgh"[: len(answers)])), fake


async def test_a_replica_s_answer_is_passed_on() -> None:
    model, handle = backend(Pooled(ANSWER, "a"))
    assert await model.send(REQUEST) == ANSWER
    assert await model.send(DescribeRequest()) == DESCRIPTION
    assert not handle.calls[0].is_cancelled


async def test_a_refusal_by_the_only_replica_is_raised_at_once() -> None:
    model, handle = backend(full("a"))
    for num_calls in (1, 2, 3):
        with pytest.raises(OverloadedError, match="full") as caught:
            await model.send(REQUEST)
        assert caught.value.retry_after_s == 7
        assert len(handle.calls) == num_calls


async def test_a_request_that_one_replica_refuses_is_offered_to_another() -> None:
    model, handle = backend(Pooled(ANSWER, "b"), full("a", 1))
    for num_calls in (1, 3, 5):
        assert await model.send(REQUEST) == ANSWER
        assert len(handle.calls) == num_calls


async def test_if_all_replicas_refuse_the_shortest_wait_is_reported_after_a_few_attempts() -> None:
    waits_s = {"a": 9, "b": 4, "c": 6, "d": 3, "e": 8}
    model, handle = backend(*(full(name, waits_s[name]) for name in waits_s))
    with pytest.raises(OverloadedError) as caught:
        await model.send(REQUEST)
    assert caught.value.retry_after_s == 4
    assert len(handle.calls) == MAX_ATTEMPTS


@for_each(*ERRORS)
async def test_ray_s_errors_become_ours(theirs: Exception, ours: type[Exception]) -> None:
    model, handle = backend(theirs)
    with pytest.raises(ours) as caught:
        await model.send(REQUEST)
    assert type(caught.value) is ours
    assert "secret" not in str(caught.value)
    assert handle.calls[0].is_cancelled


async def test_the_param_of_an_error_reaches_the_caller() -> None:
    model, _ = backend(dual_error(ContextLengthExceededError("too long", "input[3]")))
    with pytest.raises(ContextLengthExceededError) as caught:
        await model.send(REQUEST)
    assert (str(caught.value), caught.value.param) == ("too long", "input[3]")


async def test_a_dead_replica_fails_a_ping() -> None:
    with pytest.raises(ReplicaUnavailableError):
        await backend(ActorDiedError())[0].send(PingRequest())


async def test_a_client_that_leaves_cancels_the_replica_s_call() -> None:
    model, handle = backend(asyncio.Event())
    asked = asyncio.ensure_future(model.send(REQUEST))
    await settle()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert handle.calls[0].is_cancelled


async def test_a_replica_is_told_how_long_ago_the_request_arrived() -> None:
    sent: list[PoolingRequest] = []

    class Replica:
        async def pool(self, request: PoolingRequest) -> Pooled:
            sent.append(request)
            return Pooled(ANSWER, "a")

    record = RequestRecord("r", "POST", now=lambda: 12.5, started_s=10.0)
    handle = cast("DeploymentHandle[Any]", LocalHandle(Replica()))
    token = CURRENT_RECORD.set(record)
    try:
        assert await HandleBackend(handle).send(REQUEST) == ANSWER
    finally:
        CURRENT_RECORD.reset(token)
    assert [request.elapsed_s for request in sent] == [2.5]


async def test_a_replica_is_told_what_all_replicas_served_to_the_tenant() -> None:
    sent: list[PoolingRequest] = []

    class Replica:
        async def pool(self, request: PoolingRequest) -> Pooled:
            sent.append(request)
            return Pooled(ANSWER, "a")

    model = HandleBackend(cast("DeploymentHandle[Any]", LocalHandle(Replica())))
    mine = replace(REQUEST, claim=Claim(tenant="mine"))
    for request in (mine, REQUEST, mine):
        assert await model.send(request) == ANSWER
    assert [request.claim.num_served for request in sent] == [0, 0, 3]
    assert [request.claim.backlog for request in sent] == [1, 2, 3], "none waited meanwhile"
    assert {request.claim.ingress for request in sent} == {model._channels.channel_id}


class Suspects:
    """A classifier's replica in this process, which gets only suspects."""

    def __init__(self, end: Pooled | Refused | BaseException) -> None:
        self.channels = ChannelServer("127.0.0.1")
        self.num_begun = 0
        self.idle = asyncio.Event()
        self._end = end

    async def pool_in_turn(
        self, request: PoolingRequest
    ) -> AsyncGenerator[list[PoolingEvent], None]:
        assert request.num_deaths
        try:
            with self.channels.go_aheads.expect() as go_ahead:
                yield [Started(await self.channels.address(), go_ahead.number)]
                if not await go_ahead.is_given():
                    return
            self.num_begun += 1
            if isinstance(self._end, BaseException):
                raise self._end
            yield [self._end]
        finally:
            self.idle.set()


@asynccontextmanager
async def suspects(
    end: Pooled | Refused | BaseException,
) -> AsyncIterator[tuple[HandleBackend, Suspects]]:
    replica = Suspects(end)
    handle = cast("DeploymentHandle[Any]", LocalHandle(replica))
    async with aclosing(HandleBackend(handle)) as model:
        yield model, replica
    await replica.idle.wait()
    replica.channels.close()


SUSPECT = replace(REQUEST, num_deaths=1)


async def test_a_suspect_is_answered_after_its_go_ahead() -> None:
    async with suspects(Pooled(ANSWER, "a")) as (model, replica):
        assert await model.send(SUSPECT) == ANSWER
        assert replica.num_begun == 1
    async with suspects(full("a")) as (model, _):
        with pytest.raises(OverloadedError, match="full"):
            await model.send(SUSPECT)


async def test_a_suspect_that_is_lost_after_its_go_ahead_has_begun() -> None:
    async with suspects(ActorDiedError()) as (model, _):
        with pytest.raises(LostAfterStartError):
            await model.send(SUSPECT)


async def test_a_suspect_without_its_go_ahead_has_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(go_ahead, "TICK_S", 0.0)
    async with suspects(ActorDiedError()) as (model, replica):
        with pytest.raises(ReplicaUnavailableError) as caught:
            await model.send(SUSPECT)
        assert not isinstance(caught.value, LostAfterStartError)
        assert replica.num_begun == 0


async def test_a_suspect_that_is_lost_before_its_start_has_not_begun() -> None:
    model, handle = backend()
    handle.suspects.put(ActorDiedError())
    with pytest.raises(ReplicaUnavailableError) as caught:
        await model.send(SUSPECT)
    assert not isinstance(caught.value, LostAfterStartError)
    assert handle.suspects.is_cancelled


async def test_a_suspect_whose_replica_is_stopped_did_not_kill_it() -> None:
    async with suspects(asyncio.CancelledError()) as (model, _):
        with pytest.raises(ReplicaStoppedError):
            await model.send(SUSPECT)


Fate = PoolingAnswer | BaseException

LATE, UNREACHABLE = TimeoutError("late"), TimeoutError("unreachable")
"""Why the go-ahead does not reach a replica that has announced its start."""


class Sleeper:
    """A replica in this process whose model has no turn when it is asked.

    Its calls that wait for the turn meet these fates, one after the other.
    """

    def __init__(self, *fates: tuple[Fate, Fate | None]) -> None:
        self.channels = ChannelServer("127.0.0.1")
        self.asked: list[PoolingRequest] = []
        self._fates = iter(fates)

    async def pool(self, request: PoolingRequest) -> PoolingAnswer:
        return Asleep("a")

    async def pool_in_turn(
        self, request: PoolingRequest
    ) -> AsyncGenerator[list[PoolingEvent], None]:
        self.asked.append(request)
        while_asleep, then = next(self._fates)
        if isinstance(then, ActorDiedError) and isinstance(while_asleep, ActorDiedError):
            raise then
        for waited_s in (0.0, 2.0):
            yield [Waking("m", waited_s, "a")]
        if isinstance(while_asleep, BaseException):
            raise while_asleep
        if then is None:
            yield [while_asleep]
            return
        address = await self.channels.address()
        if then is UNREACHABLE:
            gone = ChannelServer("127.0.0.1")
            address = await gone.address()
            gone.close()
        with self.channels.go_aheads.expect() as go_ahead:
            yield [Started(address, go_ahead.number)]
            if then in (LATE, UNREACHABLE):
                return
            assert await go_ahead.is_given()
        if isinstance(then, BaseException):
            raise then
        yield [then]


POOLED = Pooled(ANSWER, "a")
"""After `POOLED`, or anything that is no error, it wakes."""


@asynccontextmanager
async def asleep(
    *fates: tuple[Fate, Fate | None],
) -> AsyncIterator[tuple[HandleBackend, Sleeper]]:
    replica = Sleeper(*fates)
    handle = cast("DeploymentHandle[Any]", LocalHandle(replica))
    async with aclosing(HandleBackend(handle)) as model:
        yield model, replica
    replica.channels.close()


async def test_a_request_waits_for_its_model_s_turn_and_is_told_so() -> None:
    notices: list[object] = []
    record = RequestRecord("r", "POST", now=lambda: 12.5, started_s=10.0)
    record.on_notice = notices.append
    token = CURRENT_RECORD.set(record)
    try:
        async with asleep((POOLED, POOLED)) as (model, replica):
            assert await model.send(REQUEST) == ANSWER
    finally:
        CURRENT_RECORD.reset(token)
    assert [(each.num_deaths, each.elapsed_s) for each in replica.asked] == [(0, 2.5)]
    assert len(notices) == 1


async def test_a_full_model_refuses_what_would_wait_for_its_turn() -> None:
    async with asleep((full("a"), None)) as (model, _):
        with pytest.raises(OverloadedError, match="full"):
            await model.send(REQUEST)


@for_each(
    [(ActorDiedError(), None), (POOLED, POOLED)],  # killed
    [(ActorDiedError(), ActorDiedError()), (POOLED, POOLED)],  # killed before, as Serve hears later
    [(asyncio.CancelledError(), None), (POOLED, POOLED)],  # stopped, as Ray tells it
    [(POOLED, LATE), (POOLED, UNREACHABLE), (POOLED, POOLED)],
    [(POOLED, Asleep("a")), (POOLED, POOLED)],  # its turn ended before the texts were computed
)
async def test_a_request_asks_again_if_its_replica_or_its_turn_ends_too_early(
    fates: list[tuple[Fate, Fate | None]],
) -> None:
    async with asleep(*fates) as (model, replica):
        assert await model.send(REQUEST) == ANSWER
    assert [each.num_deaths for each in replica.asked] == [0] * len(fates), "it is no suspect"


async def test_a_request_that_was_begun_with_in_its_turn_may_have_killed_its_replica() -> None:
    async with asleep((POOLED, ActorDiedError())) as (model, _):
        with pytest.raises(LostAfterStartError):
            await model.send(REQUEST)


async def test_a_model_whose_replicas_all_die_before_they_wake_is_lost_in_the_end() -> None:
    async with asleep(*[(ActorDiedError(), None)] * (MAX_LOST_ASLEEP + 1)) as (model, replica):
        with pytest.raises(LostAsleepError):
            await model.send(REQUEST)
    assert len(replica.asked) == MAX_LOST_ASLEEP + 1
