import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any, Self, cast

import pytest
from ray.exceptions import ActorDiedError

from deployments.channel.server import ChannelServer
from deployments.contract.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    OverloadedError,
    OverloadReason,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.generation import (
    Accepted,
    GenerationEvent,
    GenerationRequest,
    Refused,
    RequestGroup,
    TokenizedPrompt,
    TokenizeRequest,
    Waking,
)
from deployments.contract.sampling_params import SamplingParams
from serve_app.backends.replicas.admission_queue import MAX_NUM_ASKING, AdmissionQueue
from serve_app.backends.replicas.backend import DetokenizeRequest
from serve_app.backends.replicas.handle_backend import MAX_LOST_ASLEEP, HandleBackend
from serve_app.backends.replicas.prefix_memory import prefix_keys
from serve_app.backends.replicas.refusals import MAX_ATTEMPTS
from serve_app.backends.replicas.replica_errors import LostAsleepError
from tests.serve_app.backends.replicas.test_handles import (
    ERRORS,
    FakeHandle,
    FakeResponses,
    dual_error,
    task_error,
)
from tests.serve_app.backends.replicas.test_refusals import running

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

REQUEST = GenerationRequest("r", "hi", SamplingParams())

Item = list[GenerationEvent] | BaseException


def backend(responses: object = None, answer: object = None) -> HandleBackend:
    handle = FakeHandle(responses, answer)
    return HandleBackend(cast("DeploymentHandle[Any]", handle))


@pytest.mark.parametrize(("theirs", "ours"), ERRORS)
async def test_a_failed_opening_raises_our_error_and_cancels(
    theirs: Exception, ours: type[RaystreamError]
) -> None:
    responses = FakeResponses([theirs])
    with pytest.raises(ours) as caught:
        await backend(responses).send(REQUEST)
    assert type(caught.value) is ours
    assert "secret" not in str(caught.value)
    assert responses.is_cancelled


@pytest.mark.parametrize("theirs", [dual_error, task_error])
async def test_message_and_param_of_an_error_reach_the_caller(theirs: Any) -> None:
    error = theirs(ContextLengthExceededError("too long", "messages"))
    with pytest.raises(ContextLengthExceededError) as caught:
        await backend(FakeResponses([error])).send(REQUEST)
    assert (str(caught.value), caught.value.param) == ("too long", "messages")


async def test_a_replica_that_ends_without_an_event_is_unavailable() -> None:
    with pytest.raises(ReplicaUnavailableError):
        await backend(FakeResponses([])).send(REQUEST)


class FakeRouter:
    """Sends calls to replicas in turn, and keeps the responses it made."""

    def __init__(self, *answers: list[Item]) -> None:
        self.calls: list[FakeResponses] = []
        self.requests: list[GenerationRequest] = []
        self._answers = cycle(answers)

    def options(self, method_name: str, stream: bool) -> Self:
        return self

    def remote(self, request: GenerationRequest) -> FakeResponses:
        self.requests.append(request)
        self.calls.append(FakeResponses(next(self._answers)))
        return self.calls[-1]


def full(replica_id: str, retry_after_s: int = 1) -> list[Item]:
    return [[Refused(OverloadedError("full", None, retry_after_s), replica_id)]]


@pytest.fixture
async def listening() -> AsyncIterator[ChannelServer]:
    """Listen where a replica's channel would be."""
    channels = ChannelServer("127.0.0.1")
    yield channels
    channels.close()


async def has_room(listening: ChannelServer, replica_id: str) -> list[Item]:
    return [[Accepted(3, replica_id, channel=await listening.address())]]


def routed(*answers: list[Item]) -> tuple[HandleBackend, FakeRouter]:
    """Return a model with replicas "a", "b" and so on, as many as answers, which come in turn."""
    router = FakeRouter(*answers)
    handle = cast("DeploymentHandle[Any]", router)
    return HandleBackend(handle, running(*"abcdefgh"[: len(answers)])), router


async def test_a_refusal_by_the_only_replica_is_raised_at_once_and_read_to_its_end() -> None:
    model, router = routed(full("a", 7))
    for num_calls in (1, 2, 3):
        with pytest.raises(OverloadedError, match="full") as caught:
            await model.send(REQUEST)
        assert caught.value.retry_after_s == 7
        assert len(router.calls) == num_calls
    assert all(call.is_exhausted and not call.is_cancelled for call in router.calls)


async def test_a_request_that_one_replica_refuses_is_offered_to_another(
    listening: ChannelServer,
) -> None:
    model, router = routed(await has_room(listening, "b"), full("a"))
    async with aclosing(model):
        for num_calls in (1, 3, 5):
            async with aclosing(await model.send(REQUEST)):
                assert len(router.calls) == num_calls
    keys = [request.stream for request in router.requests]
    assert len(set(keys)) == len(keys), "each call has a stream of its own"


class StubbornRouter(FakeRouter):
    """Takes the first replica by its name, as one whose figures say that it is the least busy."""

    def __init__(self, **replicas: list[Item]) -> None:
        super().__init__()
        self._replicas = replicas

    def remote(self, request: GenerationRequest) -> FakeResponses:
        self.requests.append(request)
        others = sorted(self._replicas.keys() - request.refused_by) or sorted(self._replicas)
        self.calls.append(FakeResponses(self._replicas[others[0]]))
        return self.calls[-1]


async def test_a_replica_that_has_refused_a_request_is_not_asked_before_the_others(
    listening: ChannelServer,
) -> None:
    router = StubbornRouter(a=full("a"), b=full("b"), c=await has_room(listening, "c"))
    model = HandleBackend(cast("DeploymentHandle[Any]", router), running("a", "b", "c"))
    async with aclosing(model):
        for _ in range(2):  # the next offer begins with any
            async with aclosing(await model.send(REQUEST)) as stream:
                assert stream.accepted.replica_id == "c"
    refused_by = [request.refused_by for request in router.requests]
    assert refused_by == 2 * [frozenset(), frozenset("a"), frozenset("ab")]


async def test_if_all_replicas_refuse_the_shortest_wait_is_reported_after_a_few_attempts() -> None:
    model, router = routed(
        *(full(*each) for each in [("a", 9), ("b", 4), ("c", 6), ("d", 3), ("e", 8)])
    )
    with pytest.raises(OverloadedError) as caught:
        await model.send(REQUEST)
    assert caught.value.retry_after_s == 4
    assert len(router.calls) == MAX_ATTEMPTS


WAKING = Waking("m", 0.0, "a")


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_call_whose_replica_ends_before_it_wakes_is_made_again_and_has_lost_none(
    listening: ChannelServer, is_killed: bool
) -> None:
    if is_killed:
        asleep: list[Item] = [[WAKING], ActorDiedError()]
    else:
        asleep = [[WAKING], asyncio.CancelledError()]  # as Ray raises when Serve stops a replica
    model, router = routed(asleep, await has_room(listening, "b"))
    async with aclosing(model), aclosing(await model.send(REQUEST)):
        assert len(router.calls) == 2
    assert router.calls[0].is_cancelled


async def test_a_call_leaves_a_replica_that_serve_stops_while_it_sleeps(
    listening: ChannelServer,
) -> None:
    model, router = routed([[WAKING], [WAKING]], await has_room(listening, "b"))
    running_ = model._running
    running_.replace([each for each in map(running_.find, ("b",)) if each is not None])
    async with aclosing(model), aclosing(await model.send(REQUEST)):
        assert len(router.calls) == 2
    assert router.calls[0].is_cancelled, "Serve would wait for it"


async def test_a_model_whose_replicas_all_die_before_they_wake_is_lost_in_the_end() -> None:
    model, router = routed([[WAKING], ActorDiedError()])
    with pytest.raises(LostAsleepError):
        await model.send(REQUEST)
    assert len(router.calls) == MAX_LOST_ASLEEP + 1


async def test_a_model_that_can_not_be_woken_says_so_at_once() -> None:
    error = task_error(ReplicaUnavailableError("The model could not be woken"))
    model, router = routed([[WAKING], error])
    with pytest.raises(ReplicaUnavailableError, match="could not be woken") as caught:
        await model.send(REQUEST)
    assert type(caught.value) is ReplicaUnavailableError
    assert len(router.calls) == 1


async def test_tokens_and_text_come_from_the_replica() -> None:
    tokenized = TokenizedPrompt((1, 2))
    assert await backend(answer=tokenized).send(TokenizeRequest("hi")) == tokenized
    assert await backend(answer="hi").send(DetokenizeRequest((1, 2))) == "hi"


async def test_the_replica_s_refusal_of_a_prompt_or_of_tokens_is_raised() -> None:
    refusing = backend(answer=Refused(InvalidRequestError("no such token", "tokens"), "a"))
    for call in (refusing.send(DetokenizeRequest((999,))), refusing.send(TokenizeRequest("hi"))):
        with pytest.raises(InvalidRequestError, match="no such token") as caught:
            await call
        assert caught.value.param == "tokens"


async def test_a_client_s_fault_is_raised_as_the_replica_says_it_and_costs_no_prefix(
    listening: ChannelServer,
) -> None:
    error = ContextLengthExceededError("too long", "messages")
    model, router = routed(await has_room(listening, "a"), [[Refused(error, "a")]])
    request = replace(REQUEST, prompt="a prompt that is long enough to be remembered " * 99)
    async with aclosing(model):
        async with aclosing(await model.send(request)):
            pass
        with pytest.raises(ContextLengthExceededError, match="too long") as caught:
            await model.send(request)
        assert caught.value.param == "messages"
        assert model._running.prefixes.choose(prefix_keys(request), {"a": 0, "b": 0}) == "a"
    assert router.calls[1].is_exhausted
    assert not router.calls[1].is_cancelled


class LateResponses(FakeResponses):
    async def __anext__(self) -> list[GenerationEvent]:
        await asyncio.sleep(0)
        return await super().__anext__()


class LateRouter(FakeRouter):
    def remote(self, request: GenerationRequest) -> FakeResponses:
        self.calls.append(LateResponses(next(self._answers)))
        return self.calls[-1]


async def test_one_full_refusal_goes_to_all_queued_requests_with_its_reason() -> None:
    error = OverloadedError("full", None, 7, OverloadReason.TOKENS)
    router = LateRouter([[Refused(error, "a", is_full=True)]])
    model = HandleBackend(cast("DeploymentHandle[Any]", router))
    asked = [model.send(REQUEST) for _ in range(5 * MAX_NUM_ASKING)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    refusals = [each for each in answers if isinstance(each, OverloadedError)]
    assert len(refusals) == len(answers)
    assert {(each.retry_after_s, each.reason) for each in refusals} == {(7, OverloadReason.TOKENS)}
    assert len(router.calls) < 3 * MAX_NUM_ASKING


async def test_an_admitted_request_and_a_suspect_skip_the_queue(listening: ChannelServer) -> None:
    model, router = routed(await has_room(listening, "a"))
    model._queue = AdmissionQueue(max_num_asking=0)
    group = RequestGroup("g", 2, is_first=False)
    skipping = [
        replace(REQUEST, group=group),
        replace(REQUEST, is_resumed=True),
        replace(REQUEST, num_deaths=1),
    ]
    for request in skipping:
        async with asyncio.timeout(30), aclosing(await model.send(request)):
            pass
    assert len(router.calls) == len(skipping)
    await model.aclose()


async def test_a_call_that_can_t_be_sent_leaves_nothing_behind() -> None:
    class BrokenRouter(FakeRouter):
        def remote(self, request: GenerationRequest) -> FakeResponses:
            raise RuntimeError("the router is closed")

    model = HandleBackend(cast("DeploymentHandle[Any]", BrokenRouter([])))
    with pytest.raises(RuntimeError):
        await model.send(REQUEST)
    assert not model._channels._boxes
