"""Calls to replicas through Ray Serve's handles.

Ray's exceptions become `RaystreamError`s here and nowhere else, and a call is cancelled when its
caller stops waiting for it. Everything else in `backends` builds on this module and does not import
Ray.
"""

import asyncio
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol, Self, TypeVar

import grpc  # type: ignore[import-untyped] # ships no types
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.contract.errors import (
    InvalidRequestError,
    OverloadedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.generation import Refused, Started, Waking
from deployments.contract.sampling_params import InvalidParameterError
from serve_app.backends.replicas.replica_errors import (
    LostAfterStartError,
    LostAsleepError,
    NoReplicaError,
    NotBegunError,
    ReplicaStoppedError,
    wait_patiently,
)
from serve_app.backends.replicas.token_channels import TokenChannels
from serve_app.http.request_record import current_record
from serve_app.http.stream_notices import loading

LOST: Final = (RayActorError, grpc.aio.AioRpcError)
"""What Ray raises when the process of a replica is lost."""

Handle = DeploymentHandle[Any]
"""A deployment's handle, as the composition root binds it."""

EventT_co = TypeVar("EventT_co", covariant=True)


class Call(Protocol):
    """A call to a replica, whatever it returns."""

    def cancel(self) -> None:
        """Ask the replica to stop; see the function `cancel`, which raises nothing."""
        ...


class Responses(Call, Protocol[EventT_co]):
    """The part of Ray's `DeploymentResponseGenerator` that we use: lists of events."""

    def __aiter__(self) -> Self:
        """Return itself."""
        ...

    async def __anext__(self) -> Sequence[EventT_co]:
        """Return what the replica yielded next."""
        ...


class Response(Call, Protocol):
    """The part of Ray's `DeploymentResponse` that we use."""

    def __await__(self) -> Generator[Any, None, object]:
        """Return what the replica returned."""
        ...


def cancel(call: Call) -> None:
    """Cancel a call to a replica, however far it has got.

    Ray raises the error of a call that has failed before a replica had it, as when its deployment
    has failed, once more. The caller has that error, in our words.
    """
    with suppress(Exception):
        call.cancel()


class ReplicaCall(Call, Protocol):
    """The part of Serve's `ReplicaResult` that we use."""

    async def get_async(self) -> object:
        """Return the replica's answer."""
        ...


async def ask_all(handle: Handle, method: str, timeout_s: float) -> tuple[object, ...]:
    """Call a method of every running replica; return the answers that come in time.

    The call goes past the replicas' queues, and makes Serve start none. Without a running replica
    there is no answer.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    try:
        async with asyncio.timeout_at(deadline_s):
            with translated_errors():
                # The public `results_async` loses all answers if one does not come in time.
                calls = await handle.broadcast(method)._fetch_replica_results_async()
    except (RaystreamError, TimeoutError):
        return ()
    return await _answers_of(calls, deadline_s)


async def _answers_of(calls: Sequence[ReplicaCall], deadline_s: float) -> tuple[object, ...]:
    """Return the answers that come until a time of the event loop's clock; cancel the others."""
    waiting = {asyncio.ensure_future(call.get_async()): call for call in calls}
    if not waiting:
        return ()
    try:
        left_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
        await asyncio.wait(waiting, timeout=left_s)
    finally:
        for task, call in waiting.items():
            if not task.done():
                cancel(call)
                task.cancel()
    return tuple(
        task.result()
        for task in waiting
        if task.done() and not task.cancelled() and task.exception() is None
    )


async def first_answer(
    responses: Responses[EventT_co],
    channels: TokenChannels,
    has_left: Callable[[str], bool] = lambda replica_id: False,
) -> EventT_co:
    """Return the first event of a replica's answer after `Started`; cancel the call on failure.

    The answer to `Started` is the go-ahead.

    Args:
        responses: The call.
        channels: Where the go-ahead is given.
        has_left: Whether Serve no longer routes to a replica. One that is stopped while it sleeps
            may never have its turn to wake, and Serve would wait for the call.

    Raises:
        LostAfterStartError: The replica was lost after the go-ahead.
        LostAsleepError: It was lost, or is about to end, while the call waited for it to wake.
        NotBegunError: The go-ahead did not reach it.
        RaystreamError: The replica has failed.
    """
    try:
        first = await _awake(responses, has_left)
        if isinstance(first, Started):
            first = await _answer_after_go_ahead(first, responses, channels)
        if isinstance(first, Refused):
            await read_to_end(responses)
    except StopAsyncIteration:
        raise NotBegunError("The model's replica gave no answer.") from None
    except BaseException:
        cancel(responses)
        raise
    return first


async def _answer_after_go_ahead(
    started: Started, responses: Responses[EventT_co], channels: TokenChannels
) -> EventT_co:
    """Let a request begin at its replica and return its answer.

    Raises:
        StopAsyncIteration: The replica did not get the go-ahead in time.
        LostAfterStartError: The replica was lost after the go-ahead.
        NotBegunError: It can't be reached.
        RaystreamError: The replica has failed, or was lost before the go-ahead.
    """
    try:
        channel = await channels.reach(started.channel)
    except ReplicaUnavailableError as error:
        raise NotBegunError(*error.args) from error
    wait_patiently()
    channel.give_go_ahead(started.number)
    try:
        return await channel.unless_lost(_next(responses))
    except ReplicaUnavailableError as error:
        if type(error) is ReplicaUnavailableError:
            raise LostAfterStartError(*error.args) from error
        raise


async def _awake(responses: Responses[EventT_co], has_left: Callable[[str], bool]) -> EventT_co:
    """Return the first event that is not about waking; the client is told of those."""
    event = await _next(responses)
    while isinstance(event, Waking):
        if has_left(event.replica_id):
            raise LostAsleepError("The model's replica was stopped while it slept.")
        if event.waited_s and (record := current_record()) is not None:
            record.on_notice(loading(event.model_id, event.waited_s))
        try:
            event = await _next(responses)
        except ReplicaUnavailableError as error:
            if isinstance(error, ReplicaStoppedError) or isinstance(error.__cause__, LOST):
                raise LostAsleepError(*error.args) from error
            raise  # it can't be woken, and says why
    return event


async def _next(responses: Responses[EventT_co]) -> EventT_co:
    with translated_errors():
        (event,) = await anext(responses)
    return event


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise a `RaystreamError` in place of Ray's error; let this task's own cancellation pass.

    When Serve stops a replica, Ray raises `CancelledError` in its callers too.
    `Task.cancelling` distinguishes the two: it is 0 if this task was not cancelled.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ReplicaStoppedError("The model's replica has cancelled the request.") from error
    except (StopAsyncIteration, TaskCancelledError):
        raise
    except Exception as error:
        # The replica's code may raise anything; Ray wraps it, gRPC passes it on as it is.
        ours = _translate(error)
        if ours is error:
            raise
        raise ours from error


async def read_to_end(responses: Responses[object]) -> None:
    """Read a call to its end, however it ends, so that Serve counts it as ended."""
    with suppress(RaystreamError, TaskCancelledError), translated_errors():
        async for _ in responses:
            pass


def _translate(error: Exception) -> RaystreamError:
    """Return the replica's own `RaystreamError`, or a general one that reveals no internals."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    match cause:
        case RaystreamError():
            return cause
        case InvalidParameterError():
            return InvalidRequestError(cause.message, cause.param)
        case BackPressureError():
            return OverloadedError("Too many requests wait for the model. Try again later.")
        case DeploymentUnavailableError():
            return NoReplicaError("The model has no replica.")
        case _ if isinstance(cause, LOST):
            return ReplicaUnavailableError("The model's replica can't be reached.")
        case _:
            return RaystreamError("The model's replica failed at this request.")
