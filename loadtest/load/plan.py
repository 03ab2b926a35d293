"""Plans each level of a sweep: how many requests it sends, and when they are due."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from loadtest.config.choices import Arrival
from loadtest.config.run_config import RunConfig

DEFAULT_QUEUES: Final = (5,)
DEFAULT_LOOPS: Final = 20
"""Per queue, if the configuration sets neither loops, requests nor duration."""
DEFAULT_OPEN_LOOP_REQUESTS: Final = 100


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """A level: a number of queues, or a rate.

    Attributes:
        index: The level's number in the run.
        repeat: Which repetition of the sweep it belongs to, from 0.
        num_queues: Users that each send one request after another; None in an open loop.
        rate_per_s: Requests per second; None in a closed loop.
        is_poisson: Whether the times between requests are random; otherwise all are equal.
        num_loops: Requests of each queue; None if another limit applies.
        num_requests: Total requests; None if another limit applies.
        duration_s: How long requests are sent, from the end of warm-up; None if a count decides.
        grace_s: How long requests in flight may take to finish after the last one is sent.
        ramp_s: The time over which the queues start, or the rate rises.
        num_warmups: Requests sent one after another before the load, and not counted.
        interval_s: A queue's pause between its requests.
        max_inflight: The most requests in flight at once; None is no limit.
    """

    index: int
    repeat: int = 0
    num_queues: int | None = None
    rate_per_s: float | None = None
    is_poisson: bool = True
    num_loops: int | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    grace_s: float = 30.0
    ramp_s: float = 0.0
    num_warmups: int = 0
    interval_s: float = 0.0
    max_inflight: int | None = None

    @property
    def title(self) -> str:
        """The level's name for people."""
        if self.rate_per_s is not None:
            return f"{self.rate_per_s:g} requests/s"
        return "1 queue" if self.num_queues == 1 else f"{self.num_queues} queues"

    @property
    def num_counted(self) -> int | None:
        """The number of requests without warm-up; None if the duration decides."""
        if self.num_loops is not None and self.num_queues is not None:
            return self.num_loops * self.num_queues
        return self.num_requests


def plans_of(config: RunConfig) -> list[LevelPlan]:
    """Return the levels of a configuration; repetitions of the sweep follow each other."""
    points = _points(config)
    return [
        _plan(config, repeat * len(points) + position, repeat, num_queues, rate_per_s)
        for repeat in range(config.repeat)
        for position, (num_queues, rate_per_s) in enumerate(points)
    ]


def _points(config: RunConfig) -> list[tuple[int | None, float | None]]:
    if config.rate is not None:
        return [(None, rate_per_s) for rate_per_s in config.rate]
    return [(num_queues, None) for num_queues in config.queues or DEFAULT_QUEUES]


def _plan(
    config: RunConfig,
    index: int,
    repeat: int,
    num_queues: int | None,
    rate_per_s: float | None,
) -> LevelPlan:
    has_limit = any((config.loops, config.requests, config.duration))
    default_loops = DEFAULT_LOOPS if rate_per_s is None else None
    default_requests = None if rate_per_s is None else DEFAULT_OPEN_LOOP_REQUESTS
    return LevelPlan(
        index=index,
        repeat=repeat,
        num_queues=num_queues,
        rate_per_s=rate_per_s,
        is_poisson=config.arrival is Arrival.POISSON,
        num_loops=config.loops if has_limit else default_loops,
        num_requests=config.requests if has_limit else default_requests,
        duration_s=config.duration,
        grace_s=config.grace,
        ramp_s=config.ramp,
        num_warmups=config.warmup,
        interval_s=config.interval,
        max_inflight=config.max_inflight,
    )


def arrivals_s(
    rate_per_s: float, rng: random.Random, *, is_poisson: bool, ramp_s: float = 0.0
) -> Iterator[float]:
    """Yield the times at which requests of an open loop are due, in seconds from its start.

    The sequence is endless. Arrivals at one per second are mapped onto the rising rate: after `t`
    seconds of a ramp of length `T` to rate `R`, `R t^2 / 2T` requests are due; after the ramp, `R`
    a second.

    Args:
        rate_per_s: The rate after the ramp.
        rng: The source of the gaps of a Poisson process.
        is_poisson: Whether gaps are random; otherwise all are equal.
        ramp_s: The time over which the rate rises from zero.
    """
    num_due = 0.0
    while True:
        yield _time_s(num_due, rate_per_s, ramp_s)
        num_due += rng.expovariate(1.0) if is_poisson else 1.0


def _time_s(num_due: float, rate_per_s: float, ramp_s: float) -> float:
    num_in_ramp = rate_per_s * ramp_s / 2
    if num_due <= num_in_ramp:
        return math.sqrt(2 * num_due * ramp_s / rate_per_s)
    return ramp_s + (num_due - num_in_ramp) / rate_per_s
