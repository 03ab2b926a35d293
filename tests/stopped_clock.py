"""The event loop's clock, stopped, for tests of what happens when it is due."""

import asyncio
from collections.abc import Callable

import pytest

Clock = Callable[[float], None]


def stop_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stop the running event loop's clock; return a function that advances it."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)

    def move(seconds: float) -> None:
        nonlocal now
        now += seconds

    return move


async def settle() -> None:
    """Run everything that is ready."""
    for _ in range(9):
        await asyncio.sleep(0)
