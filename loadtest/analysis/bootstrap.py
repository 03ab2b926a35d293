"""How sure a difference is: intervals from resampling what was measured.

Source: B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13 (percentile
intervals); rates are resampled by blocks of time, since neighbouring seconds are alike.
"""

from dataclasses import dataclass

import numpy as np

from loadtest.analysis.request_table import Floats

NUM_DRAWS = 2000
CONFIDENCE = 0.95
MIN_TAIL_SAMPLES = 2
"""Fewer samples than these above a percentile, and resampling can't tell how it varies."""
MAX_CELLS = 2_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """Where the true value lies, at 95 % confidence."""

    low: float
    high: float


def percentile_draws(samples: Floats, percent: float, generator: np.random.Generator) -> Floats:
    """Draw a percentile from resampled samples [n] again and again: [NUM_DRAWS].

    Nothing is resampled in fact: where the k-th of n sorted draws falls is beta distributed, which
    takes the same time for a hundred thousand samples as for a hundred.

    Returns:
        An empty array where there are too few samples to tell.

    Source: H. A. David, H. N. Nagaraja, "Order Statistics", 2003, section 2.1.
    """
    if samples.size * min(percent, 100 - percent) / 100 < MIN_TAIL_SAMPLES:
        return np.empty(0)
    rank = (samples.size - 1) * percent / 100
    places = generator.beta(rank + 1, samples.size - rank, NUM_DRAWS)
    drawn: Floats = np.sort(samples)[(places * samples.size).astype(np.int64)]
    return drawn


def mean_draws(samples: Floats, generator: np.random.Generator) -> Floats:
    """Draw the mean of samples [n] again and again: [NUM_DRAWS]; empty for fewer than five."""
    if samples.size < 5:
        return np.empty(0)
    # In batches, so that many samples do not fill the memory.
    batch = max(1, min(NUM_DRAWS, MAX_CELLS // samples.size))
    sizes = [min(batch, NUM_DRAWS - start) for start in range(0, NUM_DRAWS, batch)]
    rows = (generator.integers(0, samples.size, (size, samples.size)) for size in sizes)
    return np.concatenate([samples[of_batch].mean(axis=1) for of_batch in rows])


def relative_change(before: Floats, after: Floats) -> Interval | None:
    """Find the interval of after / before - 1 from draws of both, each [NUM_DRAWS]."""
    if not before.size or not after.size:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        change = after / before - 1
    return interval(change[np.isfinite(change)])


def interval(draws: Floats) -> Interval | None:
    """Find the interval that holds the middle 95 % of draws; None without any."""
    if not draws.size:
        return None
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(draws, [tail, 100 - tail]).tolist()
    return Interval(low, high)


def block_rates(times_s: Floats, weights: Floats, start_s: float, end_s: float) -> Floats:
    """Cut a span into blocks of time and take each one's rate: [num_blocks], per second.

    Args:
        times_s: [n], when something happened.
        weights: [n], how much.
        start_s: Where the span begins.
        end_s: Where it ends.
    """
    duration_s = end_s - start_s
    if duration_s <= 0:
        return np.empty(0)
    num_blocks = int(np.clip(duration_s, 10, 60))
    amounts, _ = np.histogram(times_s, bins=num_blocks, range=(start_s, end_s), weights=weights)
    return np.asarray(amounts / (duration_s / num_blocks), dtype=np.float64)
