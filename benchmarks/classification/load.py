"""Generates load and measures latencies, in closed loops (users wait for answers) and open ones."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Send = Callable[[int], Awaitable[object]]
"""Sends the request of this number and waits for its answer; raises if there is none."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """The latencies of the requests that were answered within a window.

    Attributes:
        window_s: The length of the window.
        samples_s: How long each request took, measured from its sending in a closed loop and from
            its scheduled time in an open one, so that requests that are sent late do not look fast.
    """

    window_s: float
    samples_s: Sequence[float] = field(repr=False)

    @property
    def rate(self) -> float:
        """Answered requests per second."""
        return len(self.samples_s) / self.window_s if self.window_s else 0.0

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the raw samples in ms, by numpy's linear rule; NaN without any."""
        return 1000 * float(np.percentile(self.samples_s, percent)) if self.samples_s else np.nan


def poisson_arrivals(rate: float, duration_s: float, *, seed: int = 0) -> list[float]:
    """Return the times of independent arrivals, in seconds from the start.

    Args:
        rate: Requests per second, on average.
        duration_s: The latest arrival.
        seed: The seed of the gaps, which are exponentially distributed.
    """
    rng = random.Random(seed)
    times = itertools.accumulate(rng.expovariate(rate) for _ in itertools.count())
    return list(itertools.takewhile(lambda time: time <= duration_s, times))


async def open_loop(send: Send, arrivals: Sequence[float]) -> Latencies:
    """Send each request at its time, whether or not earlier ones are answered.

    The window ends with the last answer.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def one(number: int, scheduled: float) -> float:
        await asyncio.sleep(started + scheduled - loop.time())
        await send(number)
        return loop.time() - started - scheduled

    samples = await asyncio.gather(*itertools.starmap(one, enumerate(arrivals)))
    return Latencies(loop.time() - started, samples)


async def closed_loop(
    send: Send, num_users: int, *, warm_up_s: float, window_s: float
) -> Latencies:
    """Run users that each send a request as soon as the previous one is answered.

    Only answers between the end of the warm-up and the end of the window count. Requests that are
    still open then are awaited but do not count.
    """
    loop = asyncio.get_running_loop()
    opens = loop.time() + warm_up_s
    closes = opens + window_s
    numbers, samples = itertools.count(), list[float]()

    async def user() -> None:
        while (sent := loop.time()) < closes:
            await send(next(numbers))
            if opens <= loop.time() <= closes:
                samples.append(loop.time() - sent)

    await asyncio.gather(*(user() for _ in range(num_users)))
    return Latencies(window_s, samples)
