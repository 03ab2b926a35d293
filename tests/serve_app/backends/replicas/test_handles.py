import asyncio
import os
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.contract.descriptions import ModelDescription
from deployments.contract.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    OverloadedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.generation import Accepted, Waking
from deployments.contract.sampling_params import InvalidParameterError, SamplingParams
from serve_app.backends.replicas.backend import DescribeRequest, PingRequest
from serve_app.backends.replicas.handle_backend import HandleBackend
from serve_app.backends.replicas.handles import first_answer
from serve_app.backends.replicas.replica_errors import NoReplicaError
from serve_app.backends.replicas.token_channels import TokenChannels
from serve_app.http.request_record import CURRENT_RECORD, RequestRecord
from tests.stopped_clock import settle

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

DESCRIPTION = ModelDescription("m", 1, 8, False, SamplingParams())


def task_error(cause: Exception) -> RayTaskError:
    make = cast("Callable[..., RayTaskError]", RayTaskError)
    return make("generate", "traceback", cause)


def dual_error(cause: Exception) -> RayTaskError:
    """Return what Serve raises: an instance of both Ray's class and the cause's class."""
    make = cast("Callable[[], RayTaskError]", task_error(cause).as_instanceof_cause)
    assert isinstance(make(), type(cause))
    return make()


ERRORS: list[tuple[Exception, type[RaystreamError]]] = [
    (ActorDiedError(), ReplicaUnavailableError),
    (ActorUnavailableError("gone", b"\0" * 16), ReplicaUnavailableError),
    (DeploymentUnavailableError(DeploymentID(name="m")), NoReplicaError),
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
        if isinstance(self._answer, DeploymentUnavailableError):
            raise self._answer  # as Ray does, whose call has never reached a replica


class FakeResponses:
    """A streaming call; its lists of events and its errors come in turn."""

    def __init__(self, items: Sequence[list[Any] | BaseException] = ()) -> None:
        self._items = [*items]
        self.error_of_cancel: Exception | None = None
        self.is_cancelled = False
        self.is_exhausted = False

    def put(self, *items: list[Any] | BaseException) -> None:
        self._items += items

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Any]:
        if not self._items:
            self.is_exhausted = True
            raise StopAsyncIteration
        item = self._items.pop(0)
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.error_of_cancel is not None:
            raise self.error_of_cancel


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
        self.wake = FakeMethod(self.response)
        self.tokenize = FakeMethod(self.response)
        self.detokenize = FakeMethod(self.response)
        self._responses = responses

    def options(self, method_name: str, stream: bool) -> FakeMethod:
        assert stream
        return FakeMethod(self._responses)


def backend(answer: object) -> HandleBackend:
    return HandleBackend(cast("DeploymentHandle[Any]", FakeHandle(answer=answer)))


async def test_our_own_cancellation_is_raised_and_cancels_the_call() -> None:
    handle = FakeHandle(answer=asyncio.Event())
    asked = asyncio.ensure_future(
        HandleBackend(cast("DeploymentHandle[Any]", handle)).send(PingRequest())
    )
    await settle()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert handle.response.is_cancelled


async def test_describe_returns_what_the_replica_says() -> None:
    assert await backend(DESCRIPTION).send(DescribeRequest()) == DESCRIPTION


@pytest.mark.parametrize("wakes", [False, True])
async def test_only_a_ping_that_wakes_a_model_wakes_a_replica_from_its_light_sleep(
    wakes: bool,
) -> None:
    handle = FakeHandle()
    called: list[str] = []

    class Noted(FakeMethod):
        def __init__(self, name: str) -> None:
            super().__init__(FakeResponse(None))
            self._name = name

        def remote(self, *args: object) -> object:
            called.append(self._name)
            return super().remote(*args)

    handle.ping, handle.wake = Noted("ping"), Noted("wake")
    await HandleBackend(cast("DeploymentHandle[Any]", handle)).send(PingRequest(wakes))
    assert called == ["wake" if wakes else "ping"]


@pytest.mark.parametrize("request_", [DescribeRequest(), PingRequest()])
async def test_a_deployment_that_failed_is_told_in_our_words(
    request_: DescribeRequest | PingRequest,
) -> None:
    with pytest.raises(NoReplicaError):
        await backend(DeploymentUnavailableError(DeploymentID(name="m"))).send(request_)


async def test_a_stream_of_a_deployment_that_failed_is_refused_in_our_words() -> None:
    unavailable = DeploymentUnavailableError(DeploymentID(name="m"))
    responses = FakeResponses([unavailable])
    responses.error_of_cancel = unavailable
    with pytest.raises(NoReplicaError):
        await first_answer(responses, TokenChannels(os.environ))


async def test_a_client_is_told_that_its_model_wakes_until_its_request_is_accepted() -> None:
    told: list[str] = []
    record = RequestRecord("r", "POST", lambda: 0.0, 0.0)
    record.on_notice = told.append
    token = CURRENT_RECORD.set(record)
    try:
        waking = [[Waking("m", waited_s, "r")] for waited_s in (0.0, 2.0, 4.1)]
        responses = FakeResponses([*waking, [Accepted(3)]])
        assert await first_answer(responses, TokenChannels(os.environ)) == Accepted(3)
    finally:
        CURRENT_RECORD.reset(token)
    assert told == ["loading m (2 s)", "loading m (4 s)"]


@pytest.mark.parametrize("request_", [DescribeRequest(), PingRequest()])
async def test_a_dead_replica_fails_every_call(request_: DescribeRequest | PingRequest) -> None:
    with pytest.raises(ReplicaUnavailableError):
        await backend(ActorDiedError()).send(request_)
