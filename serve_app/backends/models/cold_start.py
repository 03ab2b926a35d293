"""Models without a running replica: requests wake them and wait, and questions leave them asleep.

A request that finds no replica is admitted or refused at once. Then it waits, and its call to Serve
makes the controller start a replica. A client that reads a stream is told so from time to time.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from deployments.contract.claims import Claim
from deployments.contract.errors import OverloadedError, RaystreamError, ReplicaUnavailableError
from deployments.contract.generation import GenerationRequest, Request
from deployments.contract.pooling import PoolingRequest
from serve_app.backends.models.held_requests import HeldRequests
from serve_app.backends.models.serving_states import NOT_READY, DeploymentState, ServingState
from serve_app.backends.models.single_flight import SingleFlight
from serve_app.backends.replicas.backend import AnswerT, Backend, DescribeRequest, PingRequest
from serve_app.backends.replicas.replica_errors import NoReplicaError
from serve_app.backends.replicas.running_replicas import RunningReplicas
from serve_app.http.request_record import claim_of_request, current_record
from serve_app.http.stream_notices import NOTICE_INTERVAL_S, loading

logger = logging.getLogger(__name__)

POLL_INTERVAL_S: Final = 1.0
"""How often a model that loads is looked at again."""

PATIENCE_S: Final = 30.0
"""How long a call waits for a replica to start before it is made again."""

MAX_BACKOFF_S: Final = 2.0
"""The longest wait before a request that was held is offered again, if the replica is full."""


class ColdStart:
    """A model that may have no replica; then requests to it wait."""

    def __init__(
        self,
        backend: Backend,
        model_id: str,
        replicas: RunningReplicas,
        state: Callable[[], Awaitable[DeploymentState]],
        newest_state: Callable[[], Awaitable[DeploymentState]],
        describe_files: Callable[[], Coroutine[Any, Any, Any]],
        max_num_held: int,
        notice_interval_s: float = NOTICE_INTERVAL_S,
    ) -> None:
        """Start without requests.

        Args:
            backend: The model.
            model_id: Its id.
            replicas: Its replicas.
            state: Returns the state of its deployment, as the controller has told it lately.
            newest_state: Asks the controller for it first.
            describe_files: Describes the model without loading it.
            max_num_held: The most sequences that wait for a replica; see `HeldRequests`.
            notice_interval_s: Seconds between two notices to a client.
        """
        self._backend = backend
        self._model_id = model_id
        self._replicas = replicas
        self._state = state
        self._newest_state = newest_state
        self._files = SingleFlight(describe_files)
        self._requests = HeldRequests(model_id, max_num_held)
        self._notice_interval_s = notice_interval_s
        self._described: Any = None

    @property
    def is_cold(self) -> bool:
        """Whether no replica is known to run."""
        return not self._replicas.has_any

    def send(self, request: Request[AnswerT]) -> Coroutine[Any, Any, AnswerT]:
        """Ask a replica, and wait for one if none runs; see `Backend.send`.

        A description leaves a model asleep, and so does a ping unless it `wakes`.

        Raises:
            NoReplicaError: None runs, and none will.
            OverloadedError: Too many sequences wait for a replica already, or this one has made
                room for another; or a replica runs, and has no room.
            RaystreamError: The replica has failed.
        """
        return self._answer(request)

    async def _answer(self, request: Any) -> Any:
        match request:
            case DescribeRequest() | PingRequest(wakes=False):
                asked = None if self.is_cold else await self._while_any_runs(request)
                if asked is not None:
                    return asked.result()
                if isinstance(request, DescribeRequest):
                    return await self._describe(request)
                return await self._require_ready()
            case _:
                return await self._until_taken(request)

    async def _while_any_runs(self, request: Request[AnswerT]) -> "asyncio.Task[AnswerT] | None":
        """Ask a replica that runs, and return the ended call; None if the last one has left.

        The call is not made again then, and not held until another replica runs: that would wake
        the model.
        """
        asking = asyncio.ensure_future(self._backend.send(request))
        loop, has_changed = asyncio.get_running_loop(), asyncio.Event()
        stop_listening = self._replicas.listen(lambda: loop.call_soon_threadsafe(has_changed.set))
        try:
            while not asking.done() and not self.is_cold:
                has_changed.clear()
                changing = asyncio.ensure_future(has_changed.wait())
                await asyncio.wait({asking, changing}, return_when=asyncio.FIRST_COMPLETED)
                changing.cancel()
        except BaseException:
            await _drop(asking)
            raise
        finally:
            stop_listening()
        if asking.done() and not (self.is_cold and asking.exception() is not None):
            return asking
        await _drop(asking)
        return None

    async def _require_ready(self) -> None:
        """Return if the model has no replica only because of its load.

        Raises:
            NoReplicaError: It has failed.
            ReplicaUnavailableError: It loads.
        """
        await self._require_hope()
        if (await self._state()).serving in NOT_READY:
            raise ReplicaUnavailableError(f"The model {self._model_id!r} is loading.")

    async def _until_taken(self, request: Request[AnswerT]) -> AnswerT:
        """Wait for a replica to take a request, and for room: none that runs refuses it."""
        if not self.is_cold:
            return await self._backend.send(request)
        await self._require_hope()
        async with self._held(_claim_of(request), _num_places(request)):
            while True:
                try:
                    return await self._ask(request)
                except OverloadedError as error:
                    await asyncio.sleep(min(error.retry_after_s or POLL_INTERVAL_S, MAX_BACKOFF_S))

    async def _ask(self, request: Request[AnswerT]) -> AnswerT:
        """Ask a replica; ask again from time to time while none runs.

        Serve tells only a new call that it has given up on starting one. The controller's state
        tells it sooner.

        Raises:
            NoReplicaError: None runs, and none will.
            RaystreamError: The replica has failed.
        """
        while True:
            asking = asyncio.ensure_future(self._backend.send(request))
            try:
                if await self._comes(asking):
                    return asking.result()
            except BaseException:
                await _drop(asking)
                raise
            await _drop(asking)

    async def _comes(self, asking: "asyncio.Task[Any]") -> bool:
        """Return whether a call is answered, before it is to be made again.

        Raises:
            NoReplicaError: No replica runs, and none will.
        """
        now_s = asyncio.get_running_loop().time
        late_s = now_s() + PATIENCE_S
        while not (await asyncio.wait([asking], timeout=POLL_INTERVAL_S))[0]:
            if self.is_cold:
                await self._require_hope()
                if now_s() >= late_s and not asking.done():
                    return False
        return True

    async def _require_hope(self) -> None:
        """Return unless no replica will run: a call to Serve might then wait for ever.

        Raises:
            NoReplicaError: None will; the message says why.
        """
        state = await self._state()
        if self.is_cold and state.serving is ServingState.FAILED:
            raise NoReplicaError.of(self._model_id, state.failure)

    @asynccontextmanager
    async def _held(self, claim: Claim, num_places: int) -> AsyncIterator[None]:
        """Hold places among the sequences that wait, and tell the client so, during the block.

        Raises:
            OverloadedError: Too many wait; see `HeldRequests.holding`.
        """
        async with self._requests.holding(claim, num_places):
            began_s = asyncio.get_running_loop().time()
            self._tell(began_s)
            telling = asyncio.ensure_future(self._go_on_telling(began_s))
            try:
                yield
            finally:
                telling.cancel()

    def _tell(self, began_s: float) -> None:
        """Tell the client how long it has waited."""
        if (record := current_record()) is not None:
            waited_s = asyncio.get_running_loop().time() - began_s
            record.on_notice(loading(self._model_id, waited_s))

    async def _go_on_telling(self, began_s: float) -> None:
        """Tell the client again and again, until a replica runs."""
        while True:
            await asyncio.sleep(self._notice_interval_s)
            if not self.is_cold:
                return
            self._tell(began_s)

    async def _describe(self, request: DescribeRequest) -> Any:
        """Return what the model can do, without waking it; wait while it loads.

        If its files can't be read here, a replica is asked, which wakes it.
        """
        if (await self._state()).serving is ServingState.DOWN:
            async with self._held(_claim_of(request), 1):
                await self._until_not(ServingState.DOWN)
        # Of the controller and the router, either may be the first to know of a change.
        await self._until_not(ServingState.RUNNING)
        if not self.is_cold:
            return await self._backend.send(request)
        await self._require_hope()
        if self._described is None:
            try:
                self._described = await self._files.result()
            except RaystreamError:
                logger.warning("only a replica can describe %s", self._model_id, exc_info=True)
                return await self._until_taken(request)
        return self._described

    async def _until_not(self, state: ServingState) -> None:
        """Wait while no replica runs and the controller tells this state."""
        now = (await self._state()).serving
        if self.is_cold and now is state:
            now = (await self._newest_state()).serving
        while self.is_cold and now is state:
            await asyncio.sleep(POLL_INTERVAL_S)
            now = (await self._state()).serving


async def _drop(asking: "asyncio.Task[Any]") -> None:
    """Cancel a call, and close the stream that it has brought all the same."""
    asking.cancel()
    await asyncio.wait([asking])
    if asking.cancelled() or asking.exception() is not None:
        return
    if callable(close := getattr(asking.result(), "aclose", None)):
        await close()


def _claim_of(request: Request[Any]) -> Claim:
    """Return what a request claims; one that needs no claim at a replica has its task's."""
    if isinstance(request, GenerationRequest | PoolingRequest):
        return request.claim
    return claim_of_request(None)


def _num_places(request: Request[Any]) -> int:
    """Return how many places a request needs; 0 if a replica had admitted it: it is not refused."""
    if not isinstance(request, GenerationRequest):
        return 1
    if request.is_admitted:
        return 0
    return 1 if request.group is None else request.group.size
