"""The one thread that owns an engine.

Others post commands to it and get deltas back, all of one step in one call. The engine is made on
the thread as well: its OpenMP workers belong to one thread, and a second one that used them would
slow every step.

If a step fails beyond what the engine contains, the thread logs it and reports itself dead from
then on. However the thread ends, each sequence that was added and has not finished, be it in the
engine or still on its way there, ends with an error delta.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from deployments.engine.engine import Engine
from deployments.engine.engine_stats import EngineStats
from deployments.engine.output import FinishReason, TextDelta
from deployments.engine.sequence import SequenceRequest

logger = logging.getLogger(__name__)

Deltas = list[tuple[str, TextDelta]]
Command = Callable[[Engine], Deltas]


class EngineDeadError(RuntimeError):
    """The engine's thread has ended; the replica must be replaced."""


class EngineThread:
    """Runs an engine's steps while there is work and sleeps while there is none."""

    def __init__(
        self, make_engine: Callable[[], Engine], on_deltas: Callable[[Deltas], None]
    ) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            make_engine: Called once, on the thread.
            on_deltas: Called on the thread, once a turn, with all that commands and step gave, even
                if that is nothing: an abort alone changes `stats`, too.
        """
        self._make_engine = make_engine
        self._on_deltas = on_deltas
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._unfinished: set[str] = set()  # guarded by `_wake`, as the commands are
        self._engine: Future[Engine] = Future()
        self._stats = EngineStats(0, 0, 0)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> "Future[Engine]":
        """Start the thread; the future holds the engine once it is made, or why it could not be.

        Of the engine, callers may use only what does not change: `limits` and `validate`.
        """
        self._thread.start()
        return self._engine

    def stop(self) -> None:
        """End the thread after the step that runs now; unfinished sequences end with an error."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether commands will be carried out."""
        return self._thread.is_alive() and not self._is_stopping

    @property
    def stats(self) -> EngineStats:
        """How busy the engine was after its newest step."""
        return self._stats

    def add(self, request: SequenceRequest) -> None:
        """Post a new sequence. What `Engine.validate` would refuse ends with an error delta.

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
        """Post the end of a sequence; its slot is free at the next step.

        Raises:
            EngineDeadError: The thread has ended.
        """

        def abort(engine: Engine) -> Deltas:
            engine.abort(sequence_id)
            return []

        with self._wake:
            self._post(abort)
            self._unfinished.discard(sequence_id)

    def _post(self, command: Command) -> None:
        with self._wake:
            if not self.is_alive:
                raise EngineDeadError("the engine's thread has ended")
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            engine = self._make_engine()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the engine is told
            self._end_all("the engine could not be made")
            self._engine.set_exception(error)
            return
        self._engine.set_result(engine)
        why = "the engine was stopped; the request may be sent again"
        try:
            while self._wait_for_work(engine):
                self._turn(engine)
        except BaseException:  # a panic of the tokenizer's Rust code, say, is no Exception
            logger.exception("the engine's thread failed; the replica must be replaced")
            why = "the engine failed; the request may be sent again"
        self._end_all(why)

    def _wait_for_work(self, engine: Engine) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._commands or engine.has_work or self._is_stopping)
            return not self._is_stopping

    def _turn(self, engine: Engine) -> None:
        """Carry out what was posted, run a step, and hand over what both gave."""
        deltas: Deltas = []
        while self._commands:
            deltas += self._commands.popleft()(engine)
        if engine.has_work:
            deltas += engine.step()
        self._stats = engine.stats
        self._on_deltas(deltas)
        with self._wake:
            self._unfinished -= {name for name, delta in deltas if delta.finish_reason is not None}

    def _end_all(self, error: str) -> None:
        """Take no more commands and fail what is unfinished, without asking the engine."""
        with self._wake:
            self._is_stopping = True
            self._commands.clear()
            unfinished, self._unfinished = self._unfinished, set()
        if not unfinished:
            return
        delta = TextDelta((), "", FinishReason.ERROR, error)
        try:
            self._on_deltas([(name, delta) for name in unfinished])
        except Exception:
            logger.exception("nobody took the last deltas of %d sequences", len(unfinished))
