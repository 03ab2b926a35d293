"""Pooled requests that come through the channels, and their answers.

A call runs as a task of its own. It is cancelled when its client leaves or its ingress's connection
ends. Answers that are ready in the same turn of the event loop leave in one write. Serve counts no
such request: `Calls.ended` is what a replica waits for before it stops.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context

from deployments.contract.channel.wire import WireError
from deployments.contract.errors import RaystreamError, ReplicaUnavailableError
from deployments.contract.pooling import PoolingAnswer, PoolingRequest
from deployments.contract.pooling_wire import CallAnswer, decode_call, encode_answer

logger = logging.getLogger("ray.serve.raystream.channel")

Pool = Callable[[PoolingRequest], Awaitable[PoolingAnswer]]
"""Answers a request; raises a `RaystreamError` if it has failed."""


class Calls:
    """The open calls of a replica, of all its ingresses.

    Attributes:
        num_open: How many there are.
    """

    def __init__(self, pool: Pool) -> None:
        """Start without a call.

        Args:
            pool: Answers the requests.
        """
        self.num_open = 0
        self._pool = pool
        self._all_ended = asyncio.Event()

    async def ended(self) -> None:
        """Wait until no call is open."""
        while self.num_open:
            self._all_ended.clear()
            await self._all_ended.wait()

    async def answer(self, request: PoolingRequest) -> CallAnswer:
        """Return the answer to a request, whatever has become of it."""
        self.num_open += 1
        try:
            outcome = await self._outcome(request)
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._all_ended.set()
        return CallAnswer(self.num_open, outcome)

    async def _outcome(self, request: PoolingRequest) -> PoolingAnswer | RaystreamError:
        try:
            return await self._pool(request)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return ReplicaUnavailableError("The model's replica has cancelled the request.")
        except RaystreamError as error:
            logger.error("request %s has failed: %s", request.request_id, error)
            return error
        except Exception:
            logger.exception("request %s has failed", request.request_id)
            return RaystreamError("The model's replica failed at this request.")


class ConnectionCalls:
    """The open calls of one connection."""

    def __init__(self, calls: Calls, send: Callable[[bytes], None]) -> None:
        """Start without a call.

        Args:
            calls: Those of the replica.
            send: Sends bytes to the ingress.
        """
        self._calls = calls
        self._send = send
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: list[bytes] = []
        self._is_closed = False

    def hear(self, payload: bytes) -> None:
        """Begin with the request of a frame, or end one whose client has left.

        Raises:
            WireError: The frame is malformed, or its number is in use.
        """
        number, request = decode_call(payload)
        if request is None:
            if number in self._tasks:  # otherwise its answer is on the way
                self._tasks[number].cancel()
            return
        if number in self._tasks:
            raise WireError("a call's number is in use")
        # An empty context: the one of the connection is that of Serve's call that has opened it.
        running = asyncio.get_running_loop().create_task(
            self._run(number, request), context=Context()
        )
        self._tasks[number] = running
        running.add_done_callback(lambda _: self._tasks.pop(number))

    async def _run(self, number: int, request: PoolingRequest) -> None:
        answer = await self._calls.answer(request)
        if not self._answers:
            asyncio.get_running_loop().call_soon(self.flush)
        self._answers.append(encode_answer(number, answer))

    def flush(self) -> None:
        """Send the answers that are ready."""
        answers, self._answers = self._answers, []
        if answers and not self._is_closed:
            self._send(b"".join(answers))

    def close(self) -> None:
        """Cancel all calls: their answers can't be sent any more."""
        self._is_closed = True
        for running in self._tasks.values():
            running.cancel()
