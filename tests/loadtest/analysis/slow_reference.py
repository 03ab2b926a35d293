"""The definitions of all figures, written as plainly as possible: loops, no numpy."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from loadtest.results.record import ErrorKind, LevelRecord, RequestRecord


def percentile(samples: Sequence[float], percent: float) -> float:
    """Interpolate linearly between the sorted samples."""
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    lower = math.floor(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (position - lower)


def window(level: LevelRecord, records: Iterable[RequestRecord]) -> tuple[float, float]:
    if level.deadline_s is not None:
        return level.warm_s, level.deadline_s
    return level.warm_s, max((r.ended_s for r in records if not r.is_warmup), default=level.warm_s)


def attempts(records: Iterable[RequestRecord], span: tuple[float, float]) -> list[RequestRecord]:
    return [r for r in records if not r.is_warmup and span[0] <= r.sent_s <= span[1]]


def successes(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    return [r for r in records if r.error is None and r.content_s]


def gaps_ms(record: RequestRecord) -> list[float]:
    times = record.content_s
    return [(times[i + 1] - times[i]) * 1000 for i in range(len(times) - 1)]


def tpot_ms(record: RequestRecord) -> float | None:
    later = record.output_tokens - record.content_tokens[0]
    if later < 1 or len(record.content_s) < 2:
        return None
    return (record.content_s[-1] - record.content_s[0]) * 1000 / later


def samples(records: Iterable[RequestRecord], name: str) -> list[float]:
    """Return a figure of each success that has it."""
    found: list[float] = []
    for r in successes(records):
        first, last = r.content_s[0], r.content_s[-1]
        gaps = gaps_ms(r)
        tpot = tpot_ms(r)
        found += {
            "queue_delay": [(r.sent_s - r.scheduled_s) * 1000],
            "ttft": [(first - r.sent_s) * 1000],
            "ttft_sched": [(first - r.scheduled_s) * 1000],
            "tpot": [] if tpot is None else [tpot],
            "e2e": [last - r.sent_s],
            "e2e_sched": [last - r.scheduled_s],
            "chunk_gap": gaps,
            "max_stall": [max(gaps)] if gaps else [],
            "tail": [(r.ended_s - last) * 1000],
        }[name]
    return found


def tokens_in(records: Iterable[RequestRecord], span: tuple[float, float]) -> int:
    return sum(
        tokens
        for r in records
        for time, tokens in zip(r.content_s, r.content_tokens, strict=True)
        if span[0] <= time <= span[1]
    )


def ended_well_in(records: Iterable[RequestRecord], span: tuple[float, float]) -> int:
    well = successes(records)
    return sum(1 for r in well if not r.is_warmup and span[0] <= r.ended_s <= span[1])


def errors(records: Iterable[RequestRecord]) -> dict[ErrorKind, int]:
    counts: dict[ErrorKind, int] = {}
    for r in records:
        kind = r.error or (None if r.content_s else ErrorKind.EMPTY)
        if kind and kind is not ErrorKind.CANCELLED:
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def steady_duration(
    level: LevelRecord, records: Sequence[RequestRecord], span: tuple[float, float]
) -> float:
    """Measure the longest steady state by looking between neighbouring moments."""
    moments = sorted(
        {span[0], span[1]}
        | {t for r in records for t in (r.sent_s, r.ended_s) if span[0] < t < span[1]}
    )
    longest = current = 0.0
    for left, right in pairwise(moments):
        middle = (left + right) / 2
        busy = sum(1 for queue in {r.queue for r in records} if _is_busy(records, queue, middle))
        current = current + right - left if busy >= 0.95 * (level.num_queues or 0) else 0.0
        longest = max(longest, current)
    return longest


def _is_busy(records: Sequence[RequestRecord], queue: int | None, time: float) -> bool:
    own = sorted((r for r in records if r.queue == queue), key=lambda r: r.sent_s)
    if any(r.sent_s <= time <= r.ended_s for r in own):
        return True
    before = [r.ended_s for r in own if r.ended_s <= time]
    after = [r.sent_s for r in own if r.sent_s >= time]
    return bool(before and after) and min(after) - max(before) <= 0.1
