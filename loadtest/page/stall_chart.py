"""The stall map, drawn: users as lines, their stalls as marks."""

from typing import Any

from loadtest.analysis.request_table import Floats
from loadtest.analysis.run_results import Analysis
from loadtest.page.chart import Chart, axis_of, layout_of, rounded
from loadtest.page.stall_map import stall_map

MAX_LIVES = 3000


def stall_chart(analysis: Analysis) -> Chart:
    """Draw when and for whom streams stood still."""
    stalls = stall_map(analysis.tables)
    shown = slice(None, None, max(1, -(-stalls.request_sent_s.size // MAX_LIVES)))
    lives_x = _with_breaks(stalls.request_sent_s[shown], stalls.request_ended_s[shown])
    lives_y = _with_breaks(stalls.request_lane[shown], stalls.request_lane[shown])
    traces: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines", "name": "a request, from send to end", "x": lives_x,
         "y": lives_y, "line": {"color": "#d5dae1", "width": 3}, "hoverinfo": "skip"},
        {"type": "scatter", "mode": "markers", "name": "a stall, at its end",
         "x": rounded(stalls.ended_s), "y": rounded(stalls.lane, 0),
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
            "place in flight" if is_open_loop else "user", range=[0.3, _top(stalls.request_lane)]
        ),
        showlegend=True,
    )
    left_out = f" {stalls.num_left_out:,} shorter ones are left out." if stalls.num_left_out else ""
    found = (
        f"{stalls.gap_ms.size:,} gaps between pieces of text were {stalls.least_ms:,.0f} ms or "
        f"longer (three times the median gap, at least 20 ms).{left_out} Each line is a user; "
        "marks above each other mean that streams stood still together."
        if stalls.gap_ms.size
        else f"No gap between pieces of text was {stalls.least_ms:,.0f} ms or longer."
    )
    return Chart("stalls", "Stall map", found, traces, layout)


def _top(lanes: Floats) -> float:
    return float(lanes.max(initial=1.0)) + 0.7


def _with_breaks(starts: Floats, ends: Floats) -> list[float | None]:
    """Make lines of pairs, with a break after each."""
    pairs = zip(rounded(starts), rounded(ends), strict=True)
    return [value for start, end in pairs for value in (start, end, None)]
