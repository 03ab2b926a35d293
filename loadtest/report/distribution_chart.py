"""Draws the empirical distributions of each level's figures as curves."""

from typing import Any

import numpy as np

from loadtest.analysis.level_figures import samples_of, sent_in
from loadtest.analysis.metric import DISTRIBUTIONS, headline_name
from loadtest.analysis.request_table import Floats
from loadtest.analysis.run_results import Analysis
from loadtest.analysis.spans import Span
from loadtest.report.chart import COLOURS, Chart, axis_of, layout_of, rounded, token_word

MAX_CURVE_POINTS = 300
MIN_GAP_MS = 0.1
"""Shorter gaps are drawn at this value, since a logarithmic axis can't show 0."""
LOG_TICKS = [step * 10**power / 100 for power in range(8) for step in (1, 2, 5)]


def distribution_chart(analysis: Analysis) -> Chart:
    """Draw TTFT, TPOT, E2E and the chunk gaps of each level."""
    levels = analysis.results.results
    is_open_loop = bool(levels) and levels[0].is_open_loop
    names = [headline_name(n, is_open_loop=is_open_loop) for n in ("ttft", "tpot", "e2e")]
    names.append("chunk_gap")
    traces = []
    layout = layout_of(
        620, grid={"rows": 2, "columns": 2, "pattern": "independent", "xgap": 0.16, "ygap": 0.3}
    )
    for number, name in enumerate(names, 1):
        axis = "" if number == 1 else str(number)
        metric = DISTRIBUTIONS[name]
        unit = metric.unit.replace("token", token_word(levels).rstrip("s"))
        kind = (
            {"type": "log", "tickvals": LOG_TICKS}
            if name == "chunk_gap"
            else {"rangemode": "tozero"}
        )
        layout[f"xaxis{axis}"] = axis_of(f"{metric.title}, {unit}", **kind)
        layout[f"yaxis{axis}"] = axis_of("% at or below", range=[0, 101])
        traces += [
            _curve(analysis, index, name, axis, is_first=number == 1)
            for index in range(len(levels))
        ]
    text = (
        "For each level, the percentage of requests (in the last chart, of gaps) that took at most "
        "the time below; p95 is where a curve crosses 95 %. A steep curve means steady times, a "
        "long flat end a few slow requests. Only successes are shown."
    )
    return Chart("distributions", "Distributions", text, traces, layout)


def _curve(
    analysis: Analysis, index: int, name: str, axis: str, *, is_first: bool
) -> dict[str, Any]:
    level, table = analysis.results.results[index], analysis.tables[index]
    rows = sent_in(table, Span(level.window.started_s, level.window.ended_s))
    has_samples = name != "tpot" or level.token_source is not None
    samples = samples_of(table, name, rows) if has_samples else np.empty(0)
    percents, values = _quantiles(samples)
    if name == "chunk_gap":
        values = np.maximum(values, MIN_GAP_MS)
    title = level.title + (f", repeat {level.repeat + 1}" if level.repeat else "")
    return {
        "type": "scatter", "mode": "lines", "name": title, "legendgroup": str(index),
        "showlegend": is_first, "x": rounded(values, 4), "y": rounded(percents, 2),
        "xaxis": f"x{axis}", "yaxis": f"y{axis}",
        "line": {"color": COLOURS[index % len(COLOURS)], "width": 2, "shape": "hv"},
    }  # fmt: skip


def _quantiles(samples: Floats) -> tuple[Floats, Floats]:
    """Return the steps of the empirical distribution, thinned to `MAX_CURVE_POINTS`."""
    ordered = np.sort(samples)
    if not ordered.size:
        return np.empty(0), np.empty(0)
    num_points = min(ordered.size, MAX_CURVE_POINTS)
    ranks = np.unique(np.linspace(0, ordered.size - 1, num_points).round().astype(np.int64))
    return (ranks + 1) / ordered.size * 100.0, ordered[ranks]
