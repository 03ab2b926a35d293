"""The thread that owns an engine.

Other threads post commands to it and receive deltas, one call per step; two on a GPU, where texts
of the step before are handed over while a step runs. The engine is also created
on this thread: OpenMP workers belong to one thread, and using them from a second thread would slow
every step.

If a step raises an error that the engine does not handle, the thread ends and keeps the error for
`require_alive`. However the thread ends, every unfinished sequence, whether in the engine or still
queued as a command, ends with an error delta.

A step that never ends does not end the thread. `is_stuck` tells, and `abandon` ends the sequences
without the thread.

The engine may sleep and wake here, between two steps (`Engine.sleep`). An engine that can't wake
has failed.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from deployments.compute.work_watch import WorkWatch
from deployments.contract.output import EngineStats, FinishReason, TextDelta
from deployments.engine.detokenizing.detokenizers import Deltas
from deployments.engine.engine import Engine
from deployments.engine.scheduling.sequence import SequenceRequest

logger = logging.getLogger(__name__)

Command = Callable[[Engine], Deltas]


@dataclass(frozen=True, slots=True)
class _Change:
    """Puts the engine to sleep or wakes it, in its turn among the commands; may take long."""

    run: Callable[[Engine], bool]
    done: "Future[bool]" = field(default_factory=Future)


class EngineDeadError(RuntimeError):
    """The engine's thread has ended; the replica must be replaced."""


class EngineThread:
    """Runs an engine's steps while there is work and sleeps while there is none.

    After each turn, and later if nothing else wakes it, it lets the engine give idle memory back.
    """

    def __init__(
        self, make_engine: Callable[[], Engine], on_deltas: Callable[[Deltas], None]
    ) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            make_engine: Called once, on the thread.
            on_deltas: Called on the thread after each turn with the deltas of its commands and
                step. The list may be empty: an abort changes `stats` without a delta. Also called
                within a turn; see `Engine.deliver`.
        """
        self._make_engine = make_engine
        self._on_deltas = on_deltas
        self._commands: deque[Command | _Change] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._is_abandoned = False
        self._failure: BaseException | None = None
        self._watch = WorkWatch()
        self._unfinished: set[str] = set()  # guarded by `_wake`, like the commands
        self._engine: Future[Engine] = Future()
        self._stats = EngineStats(0, 0, 0)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> "Future[Engine]":
        """Start the thread; the future holds the engine, or the error that prevented its creation.

        Callers on other threads may use only the engine's constant parts: `limits` and `validate`.
        """
        self._thread.start()
        return self._engine

    def stop(self) -> None:
        """End the thread after the current step; unfinished sequences end with an error."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.is_alive() and not self._is_abandoned:
            self._thread.join()

    def abandon(self) -> None:
        """Fail all unfinished sequences and refuse further commands, while a step hangs.

        The thread is left as it is: nothing can end it, and only the end of the process frees what
        it holds.
        """
        self._is_abandoned = True
        self._end_all("the engine hangs; send the request again")

    @property
    def is_stuck(self) -> bool:
        """Whether the current turn has run for longer than any step can take."""
        made = self._engine
        return made.done() and self._watch.longest_s > made.result().max_step_s

    @property
    def is_alive(self) -> bool:
        """Whether the thread still accepts commands."""
        return self._thread.is_alive() and not self._is_stopping

    def require_alive(self) -> None:
        """Raise if the thread no longer accepts commands.

        Raises:
            EngineDeadError: It was stopped, was abandoned, or has failed; then the error that it
                failed with is the cause.
        """
        if not self.is_alive:
            raise EngineDeadError("the engine's thread has ended") from self._failure

    @property
    def stats(self) -> EngineStats:
        """The engine's load and counters after its latest turn."""
        return self._stats

    def add(self, request: SequenceRequest) -> None:
        """Post a new sequence. One that `Engine.add` refuses ends with an error delta.

        Raises:
            EngineDeadError: The thread has ended.
        """

        def add(engine: Engine) -> Deltas:
            try:
                engine.add(request)
            except ValueError as error:
                delta = TextDelta((), "", FinishReason.ERROR, str(error))
                return [(request.sequence_id, delta)]
            return []

        with self._wake:
            self._post(add)
            self._unfinished.add(request.sequence_id)

    def abort(self, sequence_id: str) -> None:
        """Post a sequence's abort; its memory is free at the next step.

        Raises:
            EngineDeadError: The thread has ended.
        """

        def abort(engine: Engine) -> Deltas:
            engine.abort(sequence_id)
            return []

        with self._wake:
            self._post(abort)
            self._unfinished.discard(sequence_id)

    def sleep(self) -> "Future[bool]":
        """Post that the engine is to sleep, once the commands before are done.

        Returns:
            Whether it sleeps then: not if it has work. `EngineDeadError` if the thread ends first.

        Raises:
            EngineDeadError: The thread has ended.
        """
        return self._change(Engine.sleep)

    def wake(self) -> "Future[bool]":
        """Post that the engine is to wake; if it can't, its thread ends.

        Returns:
            True when it is awake; the error if it can't be.

        Raises:
            EngineDeadError: The thread has ended.
        """

        def wake(engine: Engine) -> bool:
            engine.wake()
            return True

        return self._change(wake)

    def _change(self, run: Callable[[Engine], bool]) -> "Future[bool]":
        change = _Change(run)
        change.done.set_running_or_notify_cancel()  # nobody who waits can cancel it
        self._post(change)
        return change.done

    def _post(self, command: Command | _Change) -> None:
        with self._wake:
            self.require_alive()
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            engine = self._make_engine()
        except BaseException as error:  # noqa: BLE001 - the future passes it to the waiting threads
            self._end_all("the engine could not be made")
            self._engine.set_exception(error)
            return
        engine.deliver = self._on_deltas
        self._engine.set_result(engine)
        why = "the engine was stopped; send the request again"
        try:
            wait_s = engine.give_back_memory()
            while self._wait_for_work(engine, wait_s):
                if self._commands and isinstance(self._commands[0], _Change):
                    self._make(self._commands[0], engine)
                elif self._commands or engine.has_work:
                    self._turn(engine)
                wait_s = engine.give_back_memory()
        except BaseException as error:  # noqa: BLE001 - also a panic in Rust code; kept as the cause
            self._failure = error
            why = "the engine failed; send the request again"
        self._end_all(why)

    def _wait_for_work(self, engine: Engine, timeout_s: float | None) -> bool:
        """Wait for work, but no longer than that; return whether the thread is to go on."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._commands or engine.has_work or self._is_stopping, timeout_s
            )
            return not self._is_stopping

    def _make(self, change: _Change, engine: Engine) -> None:
        """Make the change that is the first command; no step, so nothing says how long it takes."""
        try:
            slept_or_woke = change.run(engine)
        except BaseException as error:
            change.done.set_exception(error)
            raise
        finally:
            self._commands.popleft()
        self._stats = engine.stats
        self._on_deltas([])
        change.done.set_result(slept_or_woke)

    def _turn(self, engine: Engine) -> None:
        """Execute the posted commands, run a step, and hand over the deltas of both."""
        deltas: Deltas = []
        with self._watch.working():
            while self._commands and not isinstance(self._commands[0], _Change):
                command = self._commands.popleft()
                assert not isinstance(command, _Change)
                deltas += command(engine)
            if engine.has_work:
                deltas += engine.step()
        self._stats = engine.stats
        self._on_deltas(deltas)
        with self._wake:
            self._unfinished -= {name for name, delta in deltas if delta.finish_reason is not None}

    def _end_all(self, error: str) -> None:
        """Refuse further commands and fail all unfinished sequences, without using the engine."""
        with self._wake:
            self._is_stopping = True
            changes = [each for each in self._commands if isinstance(each, _Change)]
            self._commands.clear()
            unfinished, self._unfinished = self._unfinished, set()
        for change in changes:
            change.done.set_exception(EngineDeadError(error))
        if not unfinished:
            return
        delta = TextDelta((), "", FinishReason.ERROR, error)
        try:
            self._on_deltas([(name, delta) for name in unfinished])
        except Exception:
            logger.exception(
                "the last deltas of %d sequences could not be delivered", len(unfinished)
            )
