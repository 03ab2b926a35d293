"""Computes a run's series over time: requests in flight, tokens per second, and TTFT.

Series are binned with a round width, so they have a few hundred points however long the run is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.analysis.metric import headline_name
from loadtest.analysis.request_table import Floats, RequestTable
from loadtest.analysis.spans import count_in_flight

MAX_BINS = 240
MAX_POINTS = 4000


@dataclass(frozen=True, slots=True)
class TimeLines:
    """Series over the run's clock.

    Attributes:
        bin_s: The width of a bin.
        middle_s: [num_bins], the middle of each bin.
        in_flight: [num_bins], the mean number of requests in flight.
        tokens_per_s: [num_bins].
        sent_s: [num_points], when each request of `ttft_ms` was sent.
        ttft_ms: [num_points], thinned for long runs.
        median_s: [num_medians], the middles of the bins in which requests were sent.
        median_ttft_ms: [num_medians].
    """

    bin_s: float
    middle_s: Floats
    in_flight: Floats
    tokens_per_s: Floats
    sent_s: Floats
    ttft_ms: Floats
    median_s: Floats
    median_ttft_ms: Floats


def bin_width(duration_s: float, max_bins: int = MAX_BINS) -> float:
    """Return the smallest width of 1, 2 or 5 times a power of ten with at most `max_bins` bins."""
    least = max(duration_s / max_bins, 1e-3)
    power = 10.0 ** np.floor(np.log10(least))
    return float(next(power * step for step in (1, 2, 5, 10) if power * step >= least * 0.9999))


def time_lines(tables: Sequence[RequestTable], *, is_open_loop: bool) -> TimeLines:
    """Return the series of a run from the tables of all its levels."""
    sent_s = np.concatenate([np.empty(0), *(table.sent_s for table in tables)])
    ended_s = np.concatenate([np.empty(0), *(table.ended_s for table in tables)])
    duration_s = float(ended_s.max()) if ended_s.size else 1.0
    width = bin_width(duration_s)
    edges = np.arange(0.0, duration_s + width, width)
    event_s = np.concatenate([np.empty(0), *(table.event_s for table in tables)])
    tokens = np.concatenate([np.empty(0), *(table.event_tokens for table in tables)])
    name = headline_name("ttft", is_open_loop=is_open_loop)
    ttft_ms = np.concatenate([np.empty(0), *(table.figures[name] for table in tables)])
    known = ~np.isnan(ttft_ms)
    median_s, medians = _medians(sent_s[known], ttft_ms[known], edges)
    few = _thinned(int(known.sum()))
    return TimeLines(
        bin_s=width,
        middle_s=edges[:-1] + width / 2,
        in_flight=_mean_counts(sent_s, ended_s, edges),
        tokens_per_s=np.histogram(event_s, bins=edges, weights=tokens)[0] / width,
        sent_s=sent_s[known][few],
        ttft_ms=ttft_ms[known][few],
        median_s=median_s,
        median_ttft_ms=medians,
    )


def _thinned(num_points: int) -> slice:
    return slice(None, None, max(1, -(-num_points // MAX_POINTS)))


def _mean_counts(started_s: Floats, ended_s: Floats, edges: Floats) -> Floats:
    """Return the mean number in flight over each bin, from the area under the step function."""
    if not started_s.size:
        return np.zeros(len(edges) - 1)
    times, counts = count_in_flight(started_s, ended_s)
    area = np.concatenate([[0.0], np.cumsum(np.diff(times) * counts[:-1])])
    means: Floats = np.diff(np.interp(edges, times, area)) / np.diff(edges)
    return means


def _medians(times_s: Floats, values: Floats, edges: Floats) -> tuple[Floats, Floats]:
    bins = np.digitize(times_s, edges) - 1
    used = np.unique(bins)
    medians = np.array([np.median(values[bins == number]) for number in used])
    return edges[used] + (edges[1] - edges[0]) / 2, medians
