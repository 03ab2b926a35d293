import asyncio
from collections.abc import Callable, Generator
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any, Self, cast

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.contract import (
    Accepted,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    InvalidParameterError,
    ModelDescription,
    Refused,
    RequestGroup,
    SamplingParams,
    TextDelta,
    TokenizedPrompt,
    TokenizeRequest,
)
from deployments.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    OverloadedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from serve_app.backends import HandleGenerationBackend
from serve_app.known_replicas import MAX_ATTEMPTS
from serve_app.opening_line import MAX_NUM_ASKING, OpeningLine

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

REQUEST = GenerationRequest("r", "hi", SamplingParams())
DELTA = TextDelta((1,), "a", FinishReason.STOP)
DESCRIPTION = ModelDescription("m", 1, 8, False, SamplingParams())

Item = list[GenerationEvent] | BaseException


def task_error(cause: Exception) -> RayTaskError:
    make = cast("Callable[..., RayTaskError]", RayTaskError)
    return make("generate", "traceback", cause)


def dual_error(cause: Exception) -> RayTaskError:
    """Return what Serve raises: an instance of Ray's class and of the cause's class at once."""
    make = cast("Callable[[], RayTaskError]", task_error(cause).as_instanceof_cause)
    assert isinstance(make(), type(cause))
    return make()


class FakeResponses:
    def __init__(self, items: list[Item]) -> None:
        self._items = list(items)
        self.is_cancelled = False
        self.is_exhausted = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[GenerationEvent]:
        if not self._items:
            self.is_exhausted = True
            raise StopAsyncIteration
        item = self._items.pop(0)
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeResponse:
    def __init__(self, answer: object) -> None:
        self._answer = answer
        self.is_cancelled = False

    def __await__(self) -> Generator[Any, None, object]:
        if isinstance(self._answer, asyncio.Event):
            yield from self._answer.wait().__await__()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeMethod:
    def __init__(self, result: object) -> None:
        self._result = result

    def remote(self, *args: object) -> object:
        return self._result


class FakeHandle:
    """The part of `DeploymentHandle` that backends use."""

    def __init__(self, responses: object = None, answer: object = None) -> None:
        self.response = FakeResponse(answer)
        self.describe = FakeMethod(self.response)
        self.ping = FakeMethod(self.response)
        self.tokenize = FakeMethod(self.response)
        self.detokenize = FakeMethod(self.response)
        self._responses = responses

    def options(self, method_name: str, stream: bool) -> FakeMethod:
        assert (method_name, stream) == ("generate", True)
        return FakeMethod(self._responses)


def backend(responses: object = None, answer: object = None) -> HandleGenerationBackend:
    handle = FakeHandle(responses, answer)
    return HandleGenerationBackend(cast("DeploymentHandle[Any]", handle))


ERRORS: list[tuple[Exception, type[RaystreamError]]] = [
    (ActorDiedError(), ReplicaUnavailableError),
    (ActorUnavailableError("gone", b"\0" * 16), ReplicaUnavailableError),
    (DeploymentUnavailableError(DeploymentID(name="m")), ReplicaUnavailableError),
    (BackPressureError(1, 1), OverloadedError),
    (dual_error(BackPressureError(1, 1)), OverloadedError),
    (dual_error(ContextLengthExceededError("too long")), ContextLengthExceededError),
    (task_error(ContextLengthExceededError("too long")), ContextLengthExceededError),
    (ContextLengthExceededError("too long"), ContextLengthExceededError),
    (dual_error(InvalidParameterError("bad", "top_k")), InvalidRequestError),
    (InvalidParameterError("bad", "top_k"), InvalidRequestError),
    (dual_error(KeyError("secret")), RaystreamError),
    (KeyError("secret"), RaystreamError),
]


@pytest.mark.parametrize(("theirs", "ours"), ERRORS)
async def test_a_failed_opening_raises_our_error_and_cancels(
    theirs: Exception, ours: type[RaystreamError]
) -> None:
    responses = FakeResponses([theirs])
    with pytest.raises(ours) as caught:
        await backend(responses).generate(REQUEST)
    assert type(caught.value) is ours
    assert "secret" not in str(caught.value)
    assert responses.is_cancelled


@pytest.mark.parametrize(("theirs", "ours"), ERRORS)
async def test_a_stream_that_breaks_raises_our_error(
    theirs: Exception, ours: type[RaystreamError]
) -> None:
    stream = await backend(FakeResponses([[Accepted(3)], [DELTA], theirs])).generate(REQUEST)
    deltas = aiter(stream)
    assert await anext(deltas) == [DELTA]
    with pytest.raises(ours) as caught:
        await anext(deltas)
    assert type(caught.value) is ours


@pytest.mark.parametrize("theirs", [dual_error, task_error])
async def test_message_and_param_survive_the_journey(theirs: Any) -> None:
    error = theirs(ContextLengthExceededError("too long", "messages"))
    with pytest.raises(ContextLengthExceededError) as caught:
        await backend(FakeResponses([error])).generate(REQUEST)
    assert (str(caught.value), caught.value.param) == ("too long", "messages")


async def test_a_replica_that_ends_without_a_word_is_a_lost_one() -> None:
    with pytest.raises(ReplicaUnavailableError):
        await backend(FakeResponses([])).generate(REQUEST)


class FakeRouter:
    """Sends each call to the next of some replicas; keeps what it made."""

    def __init__(self, *answers: list[Item]) -> None:
        self.calls: list[FakeResponses] = []
        self._answers = cycle(answers)

    def options(self, method_name: str, stream: bool) -> Self:
        return self

    def remote(self, request: GenerationRequest) -> FakeResponses:
        self.calls.append(FakeResponses(next(self._answers)))
        return self.calls[-1]


def full(replica_id: str, retry_after_s: int = 1) -> list[Item]:
    return [[Refused("full", retry_after_s, replica_id)]]


def has_room(replica_id: str) -> list[Item]:
    return [[Accepted(3, replica_id)], [DELTA]]


def routed(
    *answers: list[Item], count_refusal: Callable[[], object] = lambda: None
) -> tuple[HandleGenerationBackend, FakeRouter]:
    router = FakeRouter(*answers)
    handle = cast("DeploymentHandle[Any]", router)
    return HandleGenerationBackend(handle, count_refusal), router


async def test_a_refusal_by_the_only_replica_is_told_at_once_and_read_to_its_end() -> None:
    model, router = routed(full("a", 7))
    for num_calls in (1, 2, 3):
        with pytest.raises(OverloadedError, match="full") as caught:
            await model.generate(REQUEST)
        assert caught.value.retry_after_s == 7
        assert len(router.calls) == num_calls
    assert all(call.is_exhausted and not call.is_cancelled for call in router.calls)


async def test_what_one_replica_refuses_is_shown_to_another() -> None:
    model, router = routed(has_room("b"), full("a"))
    for num_calls in (1, 3, 5):
        stream = await model.generate(REQUEST)
        assert [deltas async for deltas in stream] == [[DELTA]]
        assert len(router.calls) == num_calls


async def test_what_all_refuse_is_told_the_least_time_and_asked_no_longer() -> None:
    model, router = routed(
        *(full(*each) for each in [("a", 9), ("b", 4), ("c", 6), ("d", 5), ("e", 8)])
    )
    for _ in range(2):
        with pytest.raises(OverloadedError):
            await model.generate(REQUEST)
    router.calls.clear()
    with pytest.raises(OverloadedError) as caught:
        await model.generate(REQUEST)
    assert caught.value.retry_after_s == 4
    assert len(router.calls) == MAX_ATTEMPTS


async def test_a_request_counts_as_refused_once_and_only_if_nobody_takes_it() -> None:
    counted: list[None] = []
    model, router = routed(
        full("a"), full("b"), has_room("c"), count_refusal=lambda: counted.append(None)
    )
    with pytest.raises(OverloadedError):
        await model.generate(REQUEST)  # only "a" is known by now
    assert len(counted) == 1
    await model.generate(REQUEST)
    assert len(router.calls) == 3
    assert len(counted) == 1, "what one refused, another took"
    with pytest.raises(OverloadedError):
        await routed(full("a"))[0].generate(REQUEST)
    for _ in range(2):
        router.calls.clear()
        router._answers = cycle([full("a"), full("b"), full("c")])
        with pytest.raises(OverloadedError):
            await model.generate(REQUEST)
        assert len(router.calls) == MAX_ATTEMPTS
    assert len(counted) == 3


async def test_a_stream_that_was_read_to_its_end_is_not_cancelled() -> None:
    responses = FakeResponses([[Accepted(3)], [DELTA]])
    stream = await backend(responses).generate(REQUEST)
    assert stream.num_prompt_tokens == 3
    assert [deltas async for deltas in stream] == [[DELTA]]
    await stream.aclose()
    assert not responses.is_cancelled


async def test_a_stream_whose_reader_stops_early_is_cancelled() -> None:
    responses = FakeResponses([[Accepted(3)], [DELTA], [DELTA]])
    stream = await backend(responses).generate(REQUEST)
    assert await anext(aiter(stream)) == [DELTA]
    await stream.aclose()
    assert responses.is_cancelled


async def test_a_cancellation_that_nobody_here_asked_for_is_a_lost_replica() -> None:
    stream = await backend(FakeResponses([[Accepted(3)], asyncio.CancelledError()])).generate(
        REQUEST
    )
    with pytest.raises(ReplicaUnavailableError):
        await anext(aiter(stream))


async def test_our_own_cancellation_is_left_alone_and_cancels_the_call() -> None:
    handle = FakeHandle(answer=asyncio.Event())
    asked = asyncio.ensure_future(
        HandleGenerationBackend(cast("DeploymentHandle[Any]", handle)).ping()
    )
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert handle.response.is_cancelled


async def test_describe_returns_what_the_replica_says() -> None:
    assert await backend(answer=DESCRIPTION).describe() == DESCRIPTION


async def test_tokens_and_text_are_the_replica_s_own() -> None:
    tokenized = TokenizedPrompt((1, 2))
    assert await backend(answer=tokenized).tokenize(TokenizeRequest("hi")) == tokenized
    assert await backend(answer="hi").detokenize((1, 2)) == "hi"


async def test_tokens_that_the_replica_refuses_are_refused_as_it_says() -> None:
    refusing = backend(answer=dual_error(InvalidRequestError("no such token", "tokens")))
    with pytest.raises(InvalidRequestError, match="no such token"):
        await refusing.detokenize((999,))


@pytest.mark.parametrize("method", ["describe", "ping"])
async def test_a_dead_replica_fails_every_question(method: str) -> None:
    with pytest.raises(ReplicaUnavailableError):
        await getattr(backend(answer=ActorDiedError()), method)()


class LateResponses(FakeResponses):
    async def __anext__(self) -> list[GenerationEvent]:
        await asyncio.sleep(0)
        return await super().__anext__()


class LateRouter(FakeRouter):
    def remote(self, request: GenerationRequest) -> FakeResponses:
        self.calls.append(LateResponses(next(self._answers)))
        return self.calls[-1]


async def test_one_refusal_of_a_full_model_is_told_to_all_who_wait_and_counted() -> None:
    counted: list[None] = []
    router = LateRouter([[Refused("full", 7, "a", True)]])
    model = HandleGenerationBackend(
        cast("DeploymentHandle[Any]", router), lambda: counted.append(None)
    )
    asked = [model.generate(REQUEST) for _ in range(5 * MAX_NUM_ASKING)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(each, OverloadedError) and each.retry_after_s == 7 for each in answers)
    assert len(counted) == len(answers)
    assert len(router.calls) < 3 * MAX_NUM_ASKING


async def test_what_belongs_to_an_admitted_request_waits_for_nobody() -> None:
    model, router = routed(has_room("a"))
    model._line = OpeningLine(max_num_asking=0)
    group = RequestGroup("g", 2, is_first=False)
    for request in (replace(REQUEST, group=group), replace(REQUEST, generated_token_ids=(1,))):
        async with asyncio.timeout(30):
            await model.generate(request)
    assert len(router.calls) == 2
