"""Where streams stood still: the chunk gaps that stand out, each at its user and its time."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.analysis.request_table import Bools, Floats, Ints, RequestTable

MAX_STALLS = 3000
STALL_FACTOR = 3.0
MIN_STALL_MS = 20.0


@dataclass(frozen=True, slots=True)
class StallMap:
    """The longest chunk gaps of a run, each at its request and its time.

    Attributes:
        least_ms: Gaps from this on are shown.
        num_left_out: How many more there were than are shown.
        lane: [num_stalls], the request's lane.
        started_s: [num_stalls].
        ended_s: [num_stalls].
        gap_ms: [num_stalls].
        request_lane: [num_requests], its user, counted from 1; in an open loop the first place
            that was free when it was sent.
        request_sent_s: [num_requests].
        request_ended_s: [num_requests].
    """

    least_ms: float
    num_left_out: int
    lane: Floats
    started_s: Floats
    ended_s: Floats
    gap_ms: Floats
    request_lane: Floats
    request_sent_s: Floats
    request_ended_s: Floats


def stall_map(tables: Sequence[RequestTable]) -> StallMap:
    """Find the gaps that stand out: three times the median, and 20 ms at least."""
    empty = np.empty(0)
    lanes = [lanes_of(table) for table in tables]
    gap_ms = np.concatenate([empty, *(table.gap_ms for table in tables)])
    ended_s = np.concatenate([empty, *(table.gap_end_s for table in tables)])
    pairs = zip(tables, lanes, strict=True)
    lane = np.concatenate([empty, *(own[table.gap_request] for table, own in pairs)])
    median = float(np.median(gap_ms)) if gap_ms.size else 0.0
    least_ms = max(STALL_FACTOR * median, MIN_STALL_MS)
    shown = _longest(gap_ms, gap_ms >= least_ms)
    return StallMap(
        least_ms=least_ms,
        num_left_out=int((gap_ms >= least_ms).sum()) - shown.size,
        lane=lane[shown],
        started_s=ended_s[shown] - gap_ms[shown] / 1000.0,
        ended_s=ended_s[shown],
        gap_ms=gap_ms[shown],
        request_lane=np.concatenate([empty, *lanes]),
        request_sent_s=np.concatenate([empty, *(table.sent_s for table in tables)]),
        request_ended_s=np.concatenate([empty, *(table.ended_s for table in tables)]),
    )


def lanes_of(table: RequestTable) -> Floats:
    """Give each request a lane in which it is alone at its time: [num_requests]."""
    if all(record.queue is not None for record in table.records):
        return np.array([(record.queue or 0) + 1 for record in table.records], dtype=np.float64)
    free: list[int] = []
    running: list[tuple[float, int]] = []
    lanes = np.empty(len(table.records))
    for row, record in enumerate(table.records):
        while running and running[0][0] <= record.sent_s:
            heapq.heappush(free, heapq.heappop(running)[1])
        lane = heapq.heappop(free) if free else len(running) + 1
        heapq.heappush(running, (record.ended_s, lane))
        lanes[row] = lane
    return lanes


def _longest(gap_ms: Floats, rows: Bools) -> Ints:
    candidates = np.flatnonzero(rows)
    longest = candidates[np.argsort(-gap_ms[candidates], kind="stable")[:MAX_STALLS]]
    return np.sort(longest).astype(np.int64)
