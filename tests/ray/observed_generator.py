"""A text generator whose inside can be seen from a test."""

import asyncio
import os
import time

from deployments.text_generator import TextGenerator


class ObservedGenerator(TextGenerator):
    """Tells its process, how many sequences run, and how far the engine has come."""

    async def wait_until_running(self, num_running: int) -> float:
        """Return the time at which so many sequences ran."""
        # The engine tells nobody how many run, so this looks.
        while self._engine.stats.num_running != num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return time.time()

    async def process_id(self) -> int:
        return os.getpid()

    async def num_steps(self) -> int:
        """Return how many steps the engine has made."""
        return self._engine.stats.num_steps
