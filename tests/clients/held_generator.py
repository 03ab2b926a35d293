"""Text generators that a test observes, and holds in the midst of an answer.

So what a client sees meanwhile was sent before the answer's end, however slow the client is.
"""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from deployments.contract.output import TextDelta
from deployments.engine.detokenizing.detokenizers import Deltas
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.generator.placed_engine import PlacedEngine
from deployments.generator.text_engine import Take
from deployments.generator_replica import GeneratorReplica
from deployments.text_generator import TextGenerator
from deployments.vllm_generator import VllmGenerator
from tests.engines import EngineName

if TYPE_CHECKING:
    from deployments.vllm_engine.engine import VllmEngine

PING = "ping-"
"""How the name of a sequence begins with which a replica checks its engine."""


class Held(GeneratorReplica):
    """Holds its answers when one has begun, until it is let go; reports what it runs."""

    async def hold(self) -> None:
        """Stop after the next text."""
        raise NotImplementedError

    async def let_go(self) -> None:
        """Go on."""
        raise NotImplementedError

    async def wait_until_admitted(self, num_requests: int) -> None:
        """Wait until this many requests have a place, running or waiting."""
        # The admission does not report its changes, so this polls.
        while self._admission.num_running + self._admission.num_waiting != num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def wait_until_running(self, num_running: int) -> None:
        """Wait until this many sequences run."""
        # The engine does not report how many run, so this polls.
        while self._engine.stats.num_running != num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def num_steps(self) -> int:
        """Return how many steps the engine has made."""
        return self._engine.stats.num_steps


class HeldGenerator(Held, TextGenerator):
    """Stops its engine."""

    def _place(self) -> PlacedEngine:
        placed = super()._place()
        engine = placed.engine
        self._gate = _Gate()
        run = engine.step

        def step() -> Deltas:
            self._gate.enter()
            deltas = run()
            if any(delta.text and not name.startswith(PING) for name, delta in deltas):
                self._gate.note_text()
            return deltas

        engine.step = step  # type: ignore[method-assign] # a gate
        return placed

    async def hold(self) -> None:
        """Stop the engine after the next text."""
        self._gate.hold()

    async def let_go(self) -> None:
        """Let the engine run on."""
        self._gate.let_go()


class HeldVllm(Held, VllmGenerator):
    """Keeps what its engine gives, since vLLM's steps are another process's."""

    def _open_engine(self) -> "VllmEngine":
        engine = super()._open_engine()
        self._closes = self._is_closed = False
        self._kept: list[tuple[Take, TextDelta]] = []
        run = engine.running

        @contextmanager
        def running(sequence: SequenceRequest, take: Take) -> Iterator[None]:
            def take_or_keep(delta: TextDelta) -> None:
                if self._is_closed:
                    self._kept.append((take, delta))
                    return
                take(delta)
                self._is_closed = self._closes and bool(delta.text)

            with run(sequence, take_or_keep):
                yield
            self._kept = [each for each in self._kept if each[0] is not take]

        engine.running = running  # type: ignore[method-assign] # a gate
        return engine

    async def hold(self) -> None:
        """Keep what comes after the next text."""
        self._closes = True

    async def let_go(self) -> None:
        """Hand on what was kept."""
        self._closes = self._is_closed = False
        kept, self._kept = self._kept, []
        for take, delta in kept:
            take(delta)
        self._channels.flush()


HELD: Final[Mapping[EngineName, type[Held]]] = {"raystream": HeldGenerator, "vllm": HeldVllm}
"""The replica of each engine."""


class _Gate:
    """Closes for the engine's thread after the next text."""

    def __init__(self) -> None:
        self._closes = self._is_closed = False
        self._changed = threading.Condition()

    def hold(self) -> None:
        with self._changed:
            self._closes = True

    def let_go(self) -> None:
        with self._changed:
            self._closes = self._is_closed = False
            self._changed.notify_all()

    def enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)

    def note_text(self) -> None:
        with self._changed:
            self._is_closed = self._closes
