"""Confidence intervals for differences, by resampling the measurements.

Source: B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13 (percentile
intervals). Rates are resampled in blocks of time, since neighbouring seconds are correlated.
"""

from dataclasses import dataclass

import numpy as np

from loadtest.analysis.request_table import Floats

NUM_DRAWS = 2000
CONFIDENCE = 0.95
MIN_TAIL_SAMPLES = 2
"""With fewer samples beyond a percentile, resampling can't show how it varies."""
MAX_CELLS = 2_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """The 95 % confidence interval of a value."""

    low: float
    high: float


def percentile_draws(samples: Floats, percent: float, generator: np.random.Generator) -> Floats:
    """Draw a percentile's bootstrap distribution from samples [n]: [NUM_DRAWS].

    Samples are not actually resampled. The rank of the k-th of n sorted draws is beta distributed,
    so drawing it takes as long for a hundred thousand samples as for a hundred.

    Returns:
        The draws; an empty array if there are too few samples.

    Source: H. A. David, H. N. Nagaraja, "Order Statistics", 2003, section 2.1.
    """
    if samples.size * min(percent, 100 - percent) / 100 < MIN_TAIL_SAMPLES:
        return np.empty(0)
    rank = (samples.size - 1) * percent / 100
    places = generator.beta(rank + 1, samples.size - rank, NUM_DRAWS)
    drawn: Floats = np.sort(samples)[(places * samples.size).astype(np.int64)]
    return drawn


def mean_draws(samples: Floats, generator: np.random.Generator) -> Floats:
    """Draw the bootstrap distribution of the mean of samples [n]: [NUM_DRAWS]; empty for n < 5."""
    if samples.size < 5:
        return np.empty(0)
    # Batches bound the memory for many samples.
    batch = max(1, min(NUM_DRAWS, MAX_CELLS // samples.size))
    sizes = [min(batch, NUM_DRAWS - start) for start in range(0, NUM_DRAWS, batch)]
    rows = (generator.integers(0, samples.size, (size, samples.size)) for size in sizes)
    return np.concatenate([samples[of_batch].mean(axis=1) for of_batch in rows])


def relative_change(before: Floats, after: Floats) -> Interval | None:
    """Return the interval of after / before - 1 from draws of both, each [NUM_DRAWS]."""
    if not before.size or not after.size:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        change = after / before - 1
    return interval(change[np.isfinite(change)])


def interval(draws: Floats) -> Interval | None:
    """Return the interval of the middle 95 % of draws; None without draws."""
    if not draws.size:
        return None
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(draws, [tail, 100 - tail]).tolist()
    return Interval(low, high)


def block_rates(times_s: Floats, weights: Floats, start_s: float, end_s: float) -> Floats:
    """Cut a span into blocks of time and return the rate of each: [num_blocks], per second.

    Args:
        times_s: [n], the times of events.
        weights: [n], the amount of each event.
        start_s: The start of the span.
        end_s: The end of the span.
    """
    duration_s = end_s - start_s
    if duration_s <= 0:
        return np.empty(0)
    num_blocks = int(np.clip(duration_s, 10, 60))
    amounts, _ = np.histogram(times_s, bins=num_blocks, range=(start_s, end_s), weights=weights)
    return np.asarray(amounts / (duration_s / num_blocks), dtype=np.float64)
