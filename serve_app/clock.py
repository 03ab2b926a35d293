"""Time, as the ingress sees it. It is injected, so that tests control it."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time and waits."""

    def unix_s(self) -> float:
        """Return seconds since 1970, UTC."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds that never run backwards."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Wait this many seconds."""
        ...


class SystemClock:
    """The machine's own clock."""

    def unix_s(self) -> float:
        """Return seconds since 1970, UTC."""
        return time.time()

    def monotonic_s(self) -> float:
        """Return seconds that never run backwards."""
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        """Wait this many seconds."""
        await asyncio.sleep(duration_s)
