"""Finds and draws stalls: long chunk gaps, by user and time."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.analysis.request_table import Bools, Floats, Ints, RequestTable
from loadtest.analysis.run_results import Analysis
from loadtest.report.chart import Chart, axis_of, layout_of, rounded

MAX_STALLS = 3000
STALL_FACTOR = 3.0
MIN_STALL_MS = 20.0
MAX_SPANS = 3000


@dataclass(frozen=True, slots=True)
class StallMap:
    """The longest chunk gaps of a run, with their users and times.

    Attributes:
        least_ms: The shortest gap that counts as a stall.
        num_left_out: The number of stalls left out.
        track: [num_stalls], the track of the stall's request.
        started_s: [num_stalls].
        ended_s: [num_stalls].
        gap_ms: [num_stalls].
        request_track: [num_requests], the track on which each request is drawn: its user, counted
            from 1; in an open loop the first track that was free when it was sent.
        request_sent_s: [num_requests].
        request_ended_s: [num_requests].
    """

    least_ms: float
    num_left_out: int
    track: Floats
    started_s: Floats
    ended_s: Floats
    gap_ms: Floats
    request_track: Floats
    request_sent_s: Floats
    request_ended_s: Floats


def stall_map(tables: Sequence[RequestTable]) -> StallMap:
    """Find the stalls: gaps of at least three times the median gap, and at least 20 ms."""
    empty = np.empty(0)
    tracks = [tracks_of(table) for table in tables]
    gap_ms = np.concatenate([empty, *(table.gap_ms for table in tables)])
    ended_s = np.concatenate([empty, *(table.gap_end_s for table in tables)])
    pairs = zip(tables, tracks, strict=True)
    track = np.concatenate([empty, *(own[table.gap_request] for table, own in pairs)])
    median = float(np.median(gap_ms)) if gap_ms.size else 0.0
    least_ms = max(STALL_FACTOR * median, MIN_STALL_MS)
    shown = _longest(gap_ms, gap_ms >= least_ms)
    return StallMap(
        least_ms=least_ms,
        num_left_out=int((gap_ms >= least_ms).sum()) - shown.size,
        track=track[shown],
        started_s=ended_s[shown] - gap_ms[shown] / 1000.0,
        ended_s=ended_s[shown],
        gap_ms=gap_ms[shown],
        request_track=np.concatenate([empty, *tracks]),
        request_sent_s=np.concatenate([empty, *(table.sent_s for table in tables)]),
        request_ended_s=np.concatenate([empty, *(table.ended_s for table in tables)]),
    )


def tracks_of(table: RequestTable) -> Floats:
    """Assign each request a track that no other request uses at the same time: [num_requests]."""
    if all(record.queue is not None for record in table.records):
        return np.array([(record.queue or 0) + 1 for record in table.records], dtype=np.float64)
    free: list[int] = []
    running: list[tuple[float, int]] = []
    tracks = np.empty(len(table.records))
    for row, record in enumerate(table.records):
        while running and running[0][0] <= record.sent_s:
            heapq.heappush(free, heapq.heappop(running)[1])
        track = heapq.heappop(free) if free else len(running) + 1
        heapq.heappush(running, (record.ended_s, track))
        tracks[row] = track
    return tracks


def _longest(gap_ms: Floats, rows: Bools) -> Ints:
    candidates = np.flatnonzero(rows)
    longest = candidates[np.argsort(-gap_ms[candidates], kind="stable")[:MAX_STALLS]]
    return np.sort(longest).astype(np.int64)


def stall_chart(analysis: Analysis) -> Chart:
    """Draw stalls by user and time."""
    stalls = stall_map(analysis.tables)
    shown = slice(None, None, max(1, -(-stalls.request_sent_s.size // MAX_SPANS)))
    spans_x = _with_breaks(stalls.request_sent_s[shown], stalls.request_ended_s[shown])
    spans_y = _with_breaks(stalls.request_track[shown], stalls.request_track[shown])
    traces: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines", "name": "a request, from send to end", "x": spans_x,
         "y": spans_y, "line": {"color": "#d5dae1", "width": 3}, "hoverinfo": "skip"},
        {"type": "scatter", "mode": "markers", "name": "a stall, at its end",
         "x": rounded(stalls.ended_s), "y": rounded(stalls.track, 0),
         "customdata": rounded(stalls.gap_ms, 1),
         "hovertemplate": "user %{y}: %{customdata} ms, until %{x} s<extra></extra>",
         "marker": {"symbol": "square", "size": 7, "color": rounded(stalls.gap_ms, 1),
                    "colorscale": "YlOrRd", "reversescale": True,
                    "showscale": bool(stalls.gap_ms.size),
                    "colorbar": {"title": {"text": "stall, ms"}},
                    "line": {"width": 0.5, "color": "#7f1d1d"}}},
    ]  # fmt: skip
    is_open_loop = any(level.is_open_loop for level in analysis.results.results)
    layout = layout_of(
        480,
        xaxis=axis_of("seconds since the start of the run", rangemode="tozero"),
        yaxis=axis_of(
            "request slot" if is_open_loop else "user", range=[0.3, _top(stalls.request_track)]
        ),
        showlegend=True,
    )
    left_out = (
        f" {stalls.num_left_out:,} shorter ones are not shown." if stalls.num_left_out else ""
    )
    found = (
        f"{stalls.gap_ms.size:,} chunk gaps were {stalls.least_ms:,.0f} ms or longer (three times "
        f"the median gap, at least 20 ms).{left_out} Each line is a user; marks above each other "
        "mean that streams stalled at the same time."
        if stalls.gap_ms.size
        else f"No chunk gap was {stalls.least_ms:,.0f} ms or longer."
    )
    return Chart("stalls", "Stall map", found, traces, layout)


def _top(tracks: Floats) -> float:
    return float(tracks.max(initial=1.0)) + 0.7


def _with_breaks(starts: Floats, ends: Floats) -> list[float | None]:
    """Return pairs of starts and ends as line segments, with a break after each."""
    pairs = zip(rounded(starts), rounded(ends), strict=True)
    return [value for start, end in pairs for value in (start, end, None)]
