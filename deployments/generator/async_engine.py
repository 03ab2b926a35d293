"""The embedded engine as an event loop sees it; see `deployments.generator.text_engine`.

The engine's thread hands over all deltas of a step at once, and the event loop gives each to the
function that takes this sequence's deltas.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Protocol

from deployments.compute.work_watch import is_hung
from deployments.contract.errors import GenerationFailedError, ReplicaUnavailableError
from deployments.contract.output import EngineStats, FinishReason, TextDelta
from deployments.contract.sampling_params import SamplingParams
from deployments.contract.unsupported_model import reason_of
from deployments.engine.detokenizing.detokenizers import Deltas
from deployments.engine.engine import Engine
from deployments.engine.engine_thread import EngineDeadError, EngineThread
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.generator.text_engine import AnyEngine, EngineFacts, Take

PROBE = SamplingParams(temperature=0, max_tokens=1)
PROGRESS = TextDelta((), "")


class Placed(Protocol):
    """An engine that is ready to run."""

    @property
    def engine(self) -> Engine:
        """The engine."""
        ...

    @property
    def facts(self) -> EngineFacts:
        """What is known of it and its model."""
        ...


class AsyncEngine(AnyEngine):
    """Runs sequences for the coroutines of one event loop.

    A delta is ready when its step has ended; on a GPU, most are once the next one is launched.
    """

    def __init__(
        self, place: Callable[[], Placed], on_stats: Callable[[EngineStats], None]
    ) -> None:
        """Prepare the engine's thread; `start` starts it.

        Args:
            place: Makes the engine; called once, on the engine's thread.
            on_stats: Called on the event loop after each turn of the engine's thread, once its
                deltas are taken.
        """
        super().__init__()
        self._place = place
        self._on_stats = on_stats
        self._takers: dict[str, Take] = {}
        self._pings: set[str] = set()
        self._num_steps_seen = 0
        self._num_steps_spread = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handed_over: deque[tuple[float, str, TextDelta]] = deque()
        self._is_spreading = False
        self._is_awake = True
        self._thread = EngineThread(self._make, self._hand_over)

    def start(self) -> EngineFacts:
        """Start the thread and wait for the engine.

        Raises:
            Exception: The exception of `place`.
        """
        self._thread.start().result()
        return self._placed.facts

    def _make(self) -> Engine:
        self._placed = self._place()
        return self._placed.engine

    def stop(self) -> None:
        """Stop the thread after its current step; unfinished sequences are aborted."""
        self._is_stopped = True
        self._thread.stop()

    async def sleep(self) -> bool:
        """Give back the memory of weights, keys and values until `wake`; see `Engine.sleep`.

        Its health is good meanwhile, as long as its thread lives; no sequence may be run.

        Returns:
            Whether it sleeps: not while a sequence runs.

        Raises:
            RaystreamError: The engine is broken, or was stopped.
        """
        self._is_awake = False  # before the thread knows: no probe gets into an engine that sleeps
        slept = False
        try:
            slept = await asyncio.shield(asyncio.wrap_future(self._thread.sleep()))
        except EngineDeadError as error:
            raise self._end_error() from error
        finally:
            self._is_awake = not slept
        return slept

    @property
    def sleep_level(self) -> int | None:
        """Where the weights are while it sleeps; see `Engine.sleep_level`."""
        return self._placed.engine.sleep_level

    async def wake(self) -> None:
        """Read the weights again; if that fails, the engine has failed.

        Raises:
            ReplicaUnavailableError: They can't be read, and why; or the engine has failed.
            GenerationAbortedError: The engine was stopped.
        """
        try:
            await asyncio.shield(asyncio.wrap_future(self._thread.wake()))
        except EngineDeadError as error:
            raise self._end_error() from error
        except Exception as error:
            why = f"The model could not be woken: {reason_of(error)}"
            raise ReplicaUnavailableError(why) from error
        self._is_awake = True

    @property
    def stats(self) -> EngineStats:
        """The engine's load and counters after its last step."""
        return self._thread.stats

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread still takes sequences."""
        return self._thread.is_alive

    def validate(self, request: SequenceRequest) -> None:
        """Refuse a sequence that could not run; see `Engine.validate`."""
        self._placed.engine.validate(request)

    def compile_grammar(self, request: SequenceRequest) -> SequenceRequest:
        """Return the request with a matcher for its grammar; see `Engine.compile_grammar`."""
        return self._placed.engine.compile_grammar(request)

    async def check_health(self) -> None:
        """Raise unless the engine has run a step since the last call, or can run one.

        An engine that has run one computes nothing for this. The answer comes within
        a second, also while a long step runs; if that can only hang, its sequences end.

        Raises:
            EngineDeadError: The engine's thread has ended, or hangs; it won't come back.
            RaystreamError: The engine is broken.
        """
        num_steps = self.stats.num_steps
        self._thread.require_alive()
        if not self._is_awake:
            return
        if num_steps == self._num_steps_seen and await is_hung(self._thread, self.ping):
            raise EngineDeadError("a step of the engine hangs")
        self._num_steps_seen = self.stats.num_steps

    async def ping(self) -> None:
        """Wait until the engine has run a step; an idle engine gets a one-token sequence.

        An engine that sleeps, or changes, sleeps on.

        Raises:
            RaystreamError: The engine is broken.
        """
        if not self._is_awake:
            self.require_alive()
            return
        probe = SequenceRequest(self.unique_id("ping"), (0,), PROBE)
        progress: asyncio.Future[TextDelta] = asyncio.get_running_loop().create_future()

        def take(delta: TextDelta) -> None:
            if not progress.done():
                progress.set_result(delta)

        self._pings.add(probe.sequence_id)
        try:
            with self.running(probe, take):
                delta = await progress
        finally:
            self._pings.discard(probe.sequence_id)
        if delta.finish_reason is FinishReason.ABORT:
            raise self._end_error()
        if delta.finish_reason is FinishReason.ERROR:
            raise GenerationFailedError(delta.error or "the generation failed")

    @contextmanager
    def running(self, sequence: SequenceRequest, take: Take) -> Iterator[None]:
        """Run a sequence, and abort it if the block ends first.

        Args:
            sequence: The sequence.
            take: Takes its deltas. The last one has a reason: `ABORT` if the engine has ended, so
                that the sequence may go on elsewhere, with an error if the engine has failed; and
                `ERROR` if the sequence itself failed.

        Raises:
            GenerationAbortedError: The engine was stopped.
            ReplicaUnavailableError: The engine has failed.
        """
        self._takers[sequence.sequence_id] = take
        self._loop = asyncio.get_running_loop()
        try:
            self._thread.add(sequence)
            yield
        except EngineDeadError as error:
            raise self._end_error() from error
        finally:
            if self._takers.pop(sequence.sequence_id, None) is not None:
                with suppress(EngineDeadError):
                    self._thread.abort(sequence.sequence_id)

    def _hand_over(self, deltas: Deltas) -> None:
        """Pass a step's deltas to the event loop; runs on the engine's thread.

        If the loop has not yet handled those of earlier steps, one call handles all.
        """
        now_s = time.monotonic()
        self._handed_over += [(now_s, name, delta) for name, delta in deltas]
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
            for name in self._pings & self._takers.keys():
                self._takers[name](PROGRESS)
        self._num_steps_spread = stats.num_steps
        try:
            self._give_out()
        finally:
            if self._handed_over:  # one that takes deltas has raised; the others get theirs
                self._hand_over([])
            self._on_stats(stats)

    def _give_out(self) -> None:
        while self._handed_over:
            self.ready_s, sequence_id, delta = self._handed_over.popleft()
            take = self._takers.get(sequence_id)
            if take is None:
                continue
            if delta.finish_reason is not None:
                del self._takers[sequence_id]
                delta = self._last(delta)
            take(delta)

    def _last(self, delta: TextDelta) -> TextDelta:
        """Return a sequence's last delta; the engine's end is no failure of the sequence."""
        if delta.finish_reason is FinishReason.ERROR and not self._thread.is_alive:
            return replace(delta, finish_reason=FinishReason.ABORT, error=self._aborted.error)
        return delta
