"""The engine as an event loop sees it: sequences go in, streams of deltas come out.

The engine's thread hands over all deltas of a step at once, and the event loop distributes them to
the streams. Closing a stream aborts its sequence.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

from deployments.contract import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.engine_thread import Deltas, EngineDeadError, EngineThread
from deployments.engine.output import EngineStats, FinishReason, TextDelta
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.errors import GenerationFailedError, ReplicaUnavailableError
from deployments.generator.delta_stream import DeltaStream

PROBE = SamplingParams(temperature=0, max_tokens=1)
PROGRESS = TextDelta((), "")

MIN_INTERVAL_S = 0.01
"""The least time between messages of a stream: 100 a second is more than a reader or a screen can
take in."""

MAX_MESSAGES_PER_S = 500.0
"""The default limit of messages to the ingress, over all streams; each costs about half a
millisecond of CPU on its way to the client."""


class AsyncEngine:
    """Runs sequences for the coroutines of one event loop.

    Attributes:
        max_messages_per_s: The rate of messages above which streams collect their tokens.
    """

    def __init__(
        self, make_engine: Callable[[], Engine], on_stats: Callable[[EngineStats], None]
    ) -> None:
        """Prepare the engine's thread; `start` starts it.

        Args:
            make_engine: Called once, on the engine's thread.
            on_stats: Called on the event loop after each turn of the engine's thread.
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
            Exception: The exception of `make_engine`.
        """
        self._thread.start().result()

    def stop(self) -> None:
        """Stop the thread after its current step; unfinished sequences end with an error."""
        self._thread.stop()

    @property
    def stats(self) -> EngineStats:
        """The engine's load and counters after its last step."""
        return self._thread.stats

    def require_alive(self) -> None:
        """Raise if the engine's thread has ended.

        Raises:
            ReplicaUnavailableError: It has; Serve will replace the replica.
        """
        if not self._thread.is_alive:
            raise ReplicaUnavailableError("the engine has ended; try again")

    def unique_id(self, name: str) -> str:
        """Return a unique name for a sequence, since clients may repeat a request id."""
        return f"{name}-{next(self._serial)}"

    async def check_health(self) -> None:
        """Raise unless the engine has run a step since the last call, or runs one now.

        Raises:
            EngineDeadError: The engine's thread has ended.
            RaystreamError: The engine is broken.
        """
        num_steps = self.stats.num_steps
        if not self._thread.is_alive:
            raise EngineDeadError("the engine's thread has ended")
        if num_steps == self._num_steps_seen:
            await self.ping()
        self._num_steps_seen = self.stats.num_steps

    async def ping(self) -> None:
        """Wait until the engine has run a step; an idle engine gets a one-token sequence.

        Raises:
            RaystreamError: The engine is broken.
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
        """Run a sequence, and abort it if the block ends first.

        Yields:
            The deltas of the sequence until it ends. Reading them raises `GenerationFailedError` if
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
        """Yield the deltas of a sequence until it ends.

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
        """Return how long each stream collects tokens, to keep all within `max_messages_per_s`."""
        return max(MIN_INTERVAL_S, len(self._streams) / self.max_messages_per_s)

    def _hand_over(self, deltas: Deltas) -> None:
        """Pass a step's deltas to the event loop; runs on the engine's thread.

        If the loop has not yet handled those of earlier steps, one call handles all.
        """
        self._handed_over += deltas
        if self._loop is None or self._loop.is_closed() or self._is_spreading:
            return
        self._is_spreading = True
        self._loop.call_soon_threadsafe(self._spread)

    def _spread(self) -> None:
        # Clear the flag first: deltas that are handed over from here on schedule their own call.
        self._is_spreading = False
        stats = self.stats
        if stats.num_steps > self._num_steps_spread:
            # Any step shows that the engine works; the probe itself may have to wait. Put progress
            # in before the deltas, because a stream's last delta must stay the last.
            for name in self._pings:
                self._streams[name].put(PROGRESS)
        self._num_steps_spread = stats.num_steps
        while self._handed_over:
            sequence_id, delta = self._handed_over.popleft()
            stream = self._streams.get(sequence_id)
            if stream is not None:
                stream.put(delta)
        self._on_stats(stats)
