"""A text generator that a test holds in the midst of an answer.

So what a client sees meanwhile was sent before the answer's end, however slow the client is.
"""

import asyncio
import threading

from deployments.engine.engine import Engine
from deployments.engine.output import TextDelta
from tests.ray.observed_generator import ObservedGenerator

NUM_STEPS = 8
"""Steps of the engine that a held answer may take: enough for its first text."""


class HeldGenerator(ObservedGenerator):
    """Stops its engine after a few steps, until it is let go."""

    def _place(self) -> Engine:
        engine = super()._place()
        self._gate = _Gate()
        run = engine.step

        def step() -> list[tuple[str, TextDelta]]:
            self._gate.enter()
            return run()

        engine.step = step  # type: ignore[method-assign]
        return engine

    async def hold(self) -> None:
        """Stop the engine after `NUM_STEPS` further steps."""
        self._gate.hold(NUM_STEPS)

    async def let_go(self) -> None:
        """Let the engine run on."""
        self._gate.let_go()

    async def wait_until_admitted(self, num_requests: int) -> None:
        """Wait until this many requests have a place, running or waiting."""
        # The admission does not report its changes, so this polls.
        while self._admission.num_running + self._admission.num_waiting != num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class _Gate:
    """Lets the engine's thread pass a number of times, or always."""

    def __init__(self) -> None:
        self._left: int | None = None
        self._changed = threading.Condition()

    def hold(self, num_times: int) -> None:
        with self._changed:
            self._left = num_times

    def let_go(self) -> None:
        with self._changed:
            self._left = None
            self._changed.notify_all()

    def enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left != 0)
            if self._left is not None:
                self._left -= 1
