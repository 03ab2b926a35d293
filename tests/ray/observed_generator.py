"""A text generator whose internals a test can observe."""

import asyncio
import time

from deployments.text_generator import TextGenerator


class ObservedGenerator(TextGenerator):
    """Reports the number of running sequences and the number of engine steps."""

    async def wait_until_running(self, num_running: int) -> float:
        """Wait until this many sequences run; return the time."""
        # The engine does not report how many run, so this polls.
        while self._engine.stats.num_running != num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return time.time()

    async def num_steps(self) -> int:
        """Return how many steps the engine has made."""
        return self._engine.stats.num_steps
