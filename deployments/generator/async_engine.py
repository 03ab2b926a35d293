"""The engine, seen from an event loop: sequences go in, streams of deltas come out.

The engine's thread hands over all deltas of a step at once; they are spread over the streams on the
loop. A stream that is closed aborts its sequence.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

from deployments.contract import SamplingParams
from deployments.delta_stream import DeltaStream
from deployments.engine.engine import Engine
from deployments.engine.engine_stats import EngineStats
from deployments.engine.engine_thread import Deltas, EngineDeadError, EngineThread
from deployments.engine.output import FinishReason, TextDelta
from deployments.engine.sequence import SequenceRequest
from deployments.errors import GenerationFailedError, ReplicaUnavailableError

PROBE = SamplingParams(temperature=0, max_tokens=1)
PROGRESS = TextDelta((), "")

MIN_INTERVAL_S = 0.01
"""A hundred messages a second in one stream: more than a reader or a screen can take in."""

MAX_MESSAGES_PER_S = 500.0
"""Messages to the ingress, over all streams; one costs about half a millisecond of CPU on its way
to the client."""


class AsyncEngine:
    """Runs sequences for the coroutines of one event loop.

    Attributes:
        max_messages_per_s: Over which the streams gather their tokens.
    """

    def __init__(
        self, make_engine: Callable[[], Engine], on_stats: Callable[[EngineStats], None]
    ) -> None:
        """Prepare the engine's thread; `start` starts it.

        Args:
            make_engine: Called once, on the engine's thread.
            on_stats: Called on the event loop when the engine has done something.
        """
        self.max_messages_per_s = MAX_MESSAGES_PER_S
        self._on_stats = on_stats
        self._streams: dict[str, DeltaStream] = {}
        self._serial = count()
        self._pings: set[str] = set()
        self._num_steps_seen = 0
        self._num_steps_spread = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handed_over: deque[tuple[str, TextDelta]] = deque()
        self._is_spreading = False
        self._thread = EngineThread(make_engine, self._hand_over)

    def start(self) -> None:
        """Start the thread and wait for the engine.

        Raises:
            Exception: What `make_engine` has raised.
        """
        self._thread.start().result()

    def stop(self) -> None:
        """End the thread after the step that runs now; unfinished sequences end with an error."""
        self._thread.stop()

    @property
    def stats(self) -> EngineStats:
        """How busy the engine was after its newest step."""
        return self._thread.stats

    def unique_id(self, name: str) -> str:
        """Return a name for a sequence; clients may use a request id twice."""
        return f"{name}-{next(self._serial)}"

    async def check_health(self) -> None:
        """Raise unless the engine has made steps since the last call, or makes one now.

        Raises:
            EngineDeadError: The engine's thread has ended.
            RaystreamError: The engine is not well.
        """
        num_steps = self.stats.num_steps
        if not self._thread.is_alive:
            raise EngineDeadError("the engine's thread has ended")
        if num_steps == self._num_steps_seen:
            await self.ping()
        self._num_steps_seen = self.stats.num_steps

    async def ping(self) -> None:
        """Wait until the engine has made a step; an idle one gets a token to run.

        Raises:
            RaystreamError: The engine is not well.
        """
        probe = SequenceRequest(self.unique_id("ping"), (0,), PROBE)
        self._pings.add(probe.sequence_id)
        try:
            with self.running(probe) as gains:
                await anext(gains)
        finally:
            self._pings.discard(probe.sequence_id)

    @contextmanager
    def running(self, sequence: SequenceRequest) -> Iterator[AsyncIterator[list[TextDelta]]]:
        """Run a sequence; abort it when the reader leaves early.

        Yields:
            What the sequence gains until it has ended. Reading raises `GenerationFailedError` if
            the sequence fails in the engine.

        Raises:
            ReplicaUnavailableError: The engine's thread has ended.
        """
        stream = self._streams[sequence.sequence_id] = DeltaStream(self._interval_s)
        self._loop = asyncio.get_running_loop()
        try:
            self._thread.add(sequence)
            yield self._read(stream)
        except EngineDeadError as error:
            raise ReplicaUnavailableError("the engine has ended; try again") from error
        finally:
            del self._streams[sequence.sequence_id]
            if not stream.is_finished:
                with suppress(EngineDeadError):
                    self._thread.abort(sequence.sequence_id)

    async def _read(self, stream: DeltaStream) -> AsyncIterator[list[TextDelta]]:
        """Yield what a sequence gains until it has ended.

        Raises:
            GenerationFailedError: The sequence failed in the engine.
            ReplicaUnavailableError: The engine's thread has ended.
        """
        while not stream.is_finished:
            deltas = await stream.take()
            if deltas[-1].finish_reason is not FinishReason.ERROR:
                yield deltas
                continue
            if deltas[:-1]:
                yield deltas[:-1]
            if not self._thread.is_alive:
                raise ReplicaUnavailableError("the engine has ended; try again")
            raise GenerationFailedError(deltas[-1].error or "the generation failed")

    def _interval_s(self) -> float:
        """Return how long a stream gathers its tokens, so that all together stay in bounds."""
        return max(MIN_INTERVAL_S, len(self._streams) / self.max_messages_per_s)

    def _hand_over(self, deltas: Deltas) -> None:
        """Pass a step's deltas to the event loop; runs on the engine's thread.

        A loop that has not come to those of the steps before gets all in one call.
        """
        self._handed_over += deltas
        if self._loop is None or self._loop.is_closed() or self._is_spreading:
            return
        self._is_spreading = True
        self._loop.call_soon_threadsafe(self._spread)

    def _spread(self) -> None:
        # In this order: what is handed over from here on finds no call on its way, and makes one.
        self._is_spreading = False
        stats = self.stats
        if stats.num_steps > self._num_steps_spread:
            # A busy engine's steps are as good as the probe's own, which may have to wait. They
            # come first: a stream's last delta must stay the last.
            for name in self._pings:
                self._streams[name].put(PROGRESS)
        self._num_steps_spread = stats.num_steps
        while self._handed_over:
            sequence_id, delta = self._handed_over.popleft()
            stream = self._streams.get(sequence_id)
            if stream is not None:
                stream.put(delta)
        self._on_stats(stats)
