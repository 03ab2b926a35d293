"""What one level of a sweep is to do."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """A level: so many queues, or such a rate.

    Attributes:
        index: Its number in the run.
        repeat: Which repetition of the sweep it belongs to, from 0.
        num_queues: Users that send one request after the other; None in an open loop.
        rate_per_s: Requests per second; None in a closed loop.
        is_poisson: Whether the times between requests are drawn, or all the same.
        num_loops: Requests of each queue; None if another limit holds.
        num_requests: Requests in all; None if another limit holds.
        duration_s: How long requests are sent, from the end of warm-up; None if a count decides.
        grace_s: How long what is under way may go on, once nothing more is sent.
        ramp_s: Over how long the queues start, or the rate rises.
        num_warmups: Requests in front that do not count, one after the other.
        interval_s: A queue's pause between its requests.
        max_inflight: Requests under way at once, at most; None is no limit.
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
        """What to call it."""
        if self.rate_per_s is not None:
            return f"{self.rate_per_s:g} requests/s"
        return "1 queue" if self.num_queues == 1 else f"{self.num_queues} queues"

    @property
    def num_counted(self) -> int | None:
        """How many requests it will send, warm-up left out; None if time decides."""
        if self.num_loops is not None and self.num_queues is not None:
            return self.num_loops * self.num_queues
        return self.num_requests
