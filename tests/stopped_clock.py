"""The event loop's clock, stopped, for tests of what happens when it is due."""

import asyncio
from collections.abc import Callable
from typing import Final

import pytest

Clock = Callable[[float], None]
MAX_TURNS: Final = 10_000
"""More turns of the loop than any test's work takes; a task that never waits would take all."""


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
    """Let every task run until it waits for a later time or for something that the test provides.

    Work in other threads is not waited for.
    """
    loop = asyncio.get_running_loop()
    ready, scheduled = vars(loop)["_ready"], vars(loop)["_scheduled"]
    for _ in range(MAX_TURNS):
        # The loop puts what has become due, and sockets that have become ready, behind this task.
        await asyncio.sleep(0)
        if not ready and not (scheduled and scheduled[0].when() <= loop.time()):
            return
    raise AssertionError("The event loop does not come to rest.")
