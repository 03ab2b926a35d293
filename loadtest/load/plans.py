"""The levels of a configuration, in their order."""

from typing import Final

from loadtest.config import Arrival, RunConfig
from loadtest.load.plan import LevelPlan

DEFAULT_QUEUES: Final = (5,)
DEFAULT_LOOPS: Final = 20
"""Of each queue, where nothing else says how much is sent."""
DEFAULT_OPEN_LOOP_REQUESTS: Final = 100


def plans_of(config: RunConfig) -> list[LevelPlan]:
    """Return the levels; a repeated sweep stands behind the one before."""
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
    is_told = any((config.loops, config.requests, config.duration))
    default_loops = DEFAULT_LOOPS if rate_per_s is None else None
    default_requests = None if rate_per_s is None else DEFAULT_OPEN_LOOP_REQUESTS
    return LevelPlan(
        index=index,
        repeat=repeat,
        num_queues=num_queues,
        rate_per_s=rate_per_s,
        is_poisson=config.arrival is Arrival.POISSON,
        num_loops=config.loops if is_told else default_loops,
        num_requests=config.requests if is_told else default_requests,
        duration_s=config.duration,
        grace_s=config.grace,
        ramp_s=config.ramp,
        num_warmups=config.warmup,
        interval_s=config.interval,
        max_inflight=config.max_inflight,
    )
