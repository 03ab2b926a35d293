"""A deadline for tests that wait on sockets: what never comes fails one test, not the run."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from threading import Timer
from typing import Any, ParamSpec

P = ParamSpec("P")

DEADLINE_S = 30


def in_time(test: Callable[P, Awaitable[None]]) -> Callable[P, Coroutine[Any, Any, None]]:
    """Fail a test that takes longer than any machine needs, also one that stops the loop's clock.

    `pytestmark = pytest.mark.in_time` does it for each asynchronous test of a module.
    """

    @wraps(test)
    async def limited(*args: P.args, **kwargs: P.kwargs) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                timer = Timer(
                    DEADLINE_S, lambda: loop.call_soon_threadsafe(limit.reschedule, loop.time())
                )
                timer.daemon = True
                timer.start()
                await test(*args, **kwargs)
        finally:
            timer.cancel()

    return limited


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true that nothing tells of."""
    while not condition():  # noqa: ASYNC110 - see above
        await asyncio.sleep(0.001)
