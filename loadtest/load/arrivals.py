"""When the requests of an open loop are due, whatever becomes of them."""

import math
import random
from collections.abc import Iterator


def arrivals_s(
    rate_per_s: float, rng: random.Random, *, is_poisson: bool, ramp_s: float = 0.0
) -> Iterator[float]:
    """Yield the times of an endless load, in seconds from its start.

    Arrivals of a load of one per second are laid onto the rising rate: after `t` seconds of a ramp
    of length `T` to rate `R`, `R t^2 / 2T` requests are due, and `R` a second from then on.

    Args:
        rate_per_s: The rate once the ramp is over.
        rng: Draws the gaps of a Poisson process.
        is_poisson: Else the gaps are all the same.
        ramp_s: Over how long the rate rises from zero.
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
