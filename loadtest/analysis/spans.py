"""The spans of time that figures cover: a level's window and its steady state."""

from dataclasses import dataclass

import numpy as np

from loadtest.analysis.request_table import Bools, Floats, Ints, RequestTable
from loadtest.results.record import LevelRecord

STEADY_SHARE = 0.95
MAX_HANDOVER_S = 0.1
"""A queue that sends its next request within this time counts as busy throughout. Otherwise the
steady state of a few queues would end with each request."""


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time with both ends included, in seconds of the run's clock."""

    started_s: float
    ended_s: float

    @property
    def duration_s(self) -> float:
        """The length, never negative."""
        return max(0.0, self.ended_s - self.started_s)

    def contains(self, times_s: Floats) -> Bools:
        """Return which times [n] are in the span: [n], bool."""
        return np.asarray((times_s >= self.started_s) & (times_s <= self.ended_s), dtype=bool)


def measured_window(level: LevelRecord, table: RequestTable) -> Span:
    """Return the window: from the end of warm-up to the deadline or the last request's end.

    If a level was stopped before its deadline, its window ends when it was stopped.
    """
    if level.deadline_s is not None:
        is_short = level.was_stopped and level.ended_s < level.deadline_s
        return Span(level.warm_s, level.ended_s if is_short else level.deadline_s)
    ended_s = table.ended_s[~table.is_warmup]
    return Span(level.warm_s, float(ended_s.max()) if ended_s.size else level.warm_s)


def count_in_flight(started_s: Floats, ended_s: Floats) -> tuple[Floats, Ints]:
    """Count the requests in flight, from their starts [n] and ends [n].

    This sweeps over the sorted starts and ends. At equal times starts come first, so a handover
    between requests is not a dip.

    Returns:
        The times of change [2n] in order, and the count from each on [2n].
    """
    times = np.concatenate([started_s, ended_s])
    steps = np.concatenate([np.ones_like(started_s), -np.ones_like(ended_s)])
    order = np.lexsort((-steps, times))
    return times[order], np.cumsum(steps[order]).astype(np.int64)


def steady_state(level: LevelRecord, table: RequestTable, window: Span) -> Span | None:
    """Find the longest part of the window with nearly all queues busy.

    Returns:
        None in an open loop, which has no queues, or if there is no such part.
    """
    if not level.num_queues:
        return None
    times, counts = count_in_flight(*_busy_spans(table))
    return _longest_above(times, counts, STEADY_SHARE * level.num_queues, window)


def _busy_spans(table: RequestTable) -> tuple[Floats, Floats]:
    """Join a queue's consecutive requests if one follows the other at once."""
    spans: dict[int | None, list[list[float]]] = {}
    for record in table.records:
        of_queue = spans.setdefault(record.queue, [])
        if of_queue and record.sent_s - of_queue[-1][1] <= MAX_HANDOVER_S:
            of_queue[-1][1] = max(of_queue[-1][1], record.ended_s)
        else:
            of_queue.append([record.sent_s, record.ended_s])
    joined = np.array([span for of_queue in spans.values() for span in of_queue])
    joined = joined.reshape(-1, 2)
    return joined[:, 0], joined[:, 1]


def _longest_above(times: Floats, counts: Ints, limit: float, window: Span) -> Span | None:
    longest: Span | None = None
    opened: float | None = None
    for time, count in zip(times.tolist(), counts.tolist(), strict=True):
        if count >= limit and opened is None:
            opened = time
        elif count < limit and opened is not None:
            span = Span(max(opened, window.started_s), min(time, window.ended_s))
            opened = None
            if span.duration_s > (longest.duration_s if longest else 0.0):
                longest = span
    return longest
