"""The charts as plotly's figures: plain data that its script draws.

Nothing of what a server said gets in here, only numbers and names of our own; so a chart holds
nothing to escape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.analysis.level_figures import samples_of, sent_in
from loadtest.analysis.load_steps import LoadStep, load_steps
from loadtest.analysis.metric import DISTRIBUTIONS, headline_name
from loadtest.analysis.request_table import Floats
from loadtest.analysis.run_results import Analysis
from loadtest.analysis.spans import Span
from loadtest.page.stall_map import stall_map
from loadtest.page.time_lines import time_lines
from loadtest.record import ErrorKind
from loadtest.summary import LevelFigures

COLOURS = (
    "#3b6fb6", "#d9822b", "#2f8f5b", "#b5477f", "#7a5fb0", "#8a6d3b", "#2a9fb5", "#6b7280",
)  # fmt: skip
BLUE, ORANGE, GREY = COLOURS[0], COLOURS[1], "#c3c9d2"
ERROR_COLOURS = dict(
    zip(
        ErrorKind,
        ("#7f1d1d", "#d9822b", "#e6b84c", "#b5477f", "#3b6fb6", "#2a9fb5", "#7a5fb0", "#c0392b",
         "#8a6d3b", "#6b7280", "#2f8f5b", GREY),
        strict=True,
    )
)  # fmt: skip
MAX_CURVE_POINTS = 300
MAX_LIVES = 3000
LOG_TICKS = [step * 10**power / 100 for power in range(8) for step in (1, 2, 5)]
MIN_TITLE_SHARE = 0.09
"""A narrower level has room for its number alone."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart of the page.

    Attributes:
        name: Its element's id.
        title: Above it.
        text: What it shows and how to read it, under the title.
        traces: Plotly's data.
        layout: Plotly's layout.
    """

    name: str
    title: str
    text: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]


def make_charts(analysis: Analysis) -> list[Chart]:
    """Make all charts that a run has something to show in."""
    steps = load_steps(analysis.results.results)
    made = [
        _load_curve(steps) if len(steps) > 1 else None,
        _time_lines(analysis),
        _distributions(analysis),
        _errors(analysis.results.results),
        _stalls(analysis),
    ]
    return [chart for chart in made if chart]


def _layout(height: int, **more: Any) -> dict[str, Any]:
    return {
        "height": height,
        "margin": {"l": 70, "r": 30, "t": 30, "b": 55},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#1f2933"},
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        **more,
    }


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {
        "title": {"text": title},
        "gridcolor": "#e8ebef",
        "zerolinecolor": "#c3c9d2",
        "linecolor": "#c3c9d2",
        **more,
    }


def _rounded(values: Floats, digits: int = 3) -> list[float]:
    rounded: list[float] = np.round(values, digits).tolist()
    return rounded


def _token_word(levels: Sequence[LevelFigures]) -> str:
    return levels[0].token_word if levels else "tokens"


def _load_curve(steps: Sequence[LoadStep]) -> Chart:
    word = "requests scheduled per second" if steps[0].is_open_loop else "users"
    load = [step.load for step in steps]
    ttft = DISTRIBUTIONS[headline_name("ttft", is_open_loop=steps[0].is_open_loop)].title
    e2e = DISTRIBUTIONS[headline_name("e2e", is_open_loop=steps[0].is_open_loop)].title
    series = (
        ("RPS", [step.median_of(lambda level: level.window.qps) for step in steps], "", COLOURS[2]),
        ("p50", [step.latency("ttft", "p50") for step in steps], "2", COLOURS[0]),
        ("p95", [step.latency("ttft", "p95") for step in steps], "2", COLOURS[1]),
        ("p50", [step.latency("e2e", "p50") for step in steps], "3", COLOURS[0]),
        ("p95", [step.latency("e2e", "p95") for step in steps], "3", COLOURS[1]),
    )
    traces = [
        {"type": "scatter", "mode": "lines+markers", "name": name, "x": load, "y": values,
         "xaxis": f"x{axis}", "yaxis": f"y{axis}", "line": {"color": colour, "width": 2},
         "showlegend": axis != "3", "legendgroup": name,
         "marker": {"size": 8}, "hovertemplate": "%{x} " + word + ": %{y:.4g}"}
        for name, values, axis, colour in series
    ]  # fmt: skip
    is_wide = load[0] > 0 and load[-1] / load[0] >= 8
    x_axis = _axis(word, tickvals=load, type="log" if is_wide else "linear")
    layout = _layout(
        380,
        grid={"rows": 1, "columns": 3, "pattern": "independent", "xgap": 0.22},
        xaxis=x_axis, yaxis=_axis("successes per second", rangemode="tozero"),
        xaxis2=x_axis, yaxis2=_axis(f"{ttft}, ms", rangemode="tozero"),
        xaxis3=x_axis, yaxis3=_axis(f"{e2e}, s", rangemode="tozero"),
    )  # fmt: skip
    text = (
        f"What more {word} bring. Where the first curve flattens and the others rise, the server "
        "is full. Of repeated levels, the median."
    )
    return Chart("load", "Load against throughput and latency", text, traces, layout)


def _time_lines(analysis: Analysis) -> Chart:
    levels = analysis.results.results
    is_open_loop = bool(levels) and levels[0].is_open_loop
    lines = time_lines(analysis.tables, is_open_loop=is_open_loop)
    word = _token_word(levels)
    ttft = DISTRIBUTIONS[headline_name("ttft", is_open_loop=is_open_loop)].title
    line = {"type": "scatter", "mode": "lines"}
    traces = [
        {**line, "name": "in flight", "x": _rounded(lines.middle_s), "y": _rounded(lines.in_flight),
         "line": {"color": BLUE, "shape": "hvh", "width": 1.5}},
        {**line, "name": f"{word}/s", "x": _rounded(lines.middle_s),
         "y": _rounded(lines.tokens_per_s), "yaxis": "y2",
         "line": {"color": COLOURS[2], "shape": "hvh", "width": 1.5}},
        {"type": "scatter", "mode": "markers", "name": f"{ttft} of each request", "yaxis": "y3",
         "x": _rounded(lines.sent_s), "y": _rounded(lines.ttft_ms),
         "marker": {"color": ORANGE, "size": 5, "opacity": 0.45}},
        {**line, "name": f"median {ttft}", "x": _rounded(lines.median_s), "yaxis": "y3",
         "y": _rounded(lines.median_ttft_ms), "line": {"color": "#8a4b0f", "width": 1.5}},
    ]  # fmt: skip
    layout = _layout(
        640,
        grid={"rows": 3, "columns": 1, "subplots": [["xy"], ["xy2"], ["xy3"]], "ygap": 0.12},
        xaxis=_axis("seconds since the start of the run", rangemode="tozero"),
        yaxis=_axis("requests in flight", rangemode="tozero"),
        yaxis2=_axis(f"{word}/s", rangemode="tozero"),
        yaxis3=_axis(f"{ttft}, ms", rangemode="tozero"),
        shapes=[_band(level) for level in levels],
        annotations=[_band_title(level, analysis.duration_s) for level in levels],
    )
    layout["margin"]["t"] = 70
    layout["legend"]["y"] = 1.06
    text = (
        f"The whole run, in bins of {lines.bin_s:g} s. The shaded bands are the windows that the "
        "figures are taken over, one for each level; warm-up and ramp lie outside, and what came "
        "after a deadline."
    )
    return Chart("time-lines", "Over time", text, traces, layout)


def _band(level: LevelFigures) -> dict[str, Any]:
    return {
        "type": "rect", "xref": "x", "yref": "paper", "layer": "below", "y0": 0, "y1": 1,
        "x0": level.window.started_s, "x1": level.window.ended_s,
        "fillcolor": BLUE, "opacity": 0.06, "line": {"width": 0},
    }  # fmt: skip


def _band_title(level: LevelFigures, run_s: float) -> dict[str, Any]:
    is_narrow = level.window.duration_s < MIN_TITLE_SHARE * run_s
    number = level.num_queues if level.num_queues is not None else level.rate_per_s
    middle_s = (level.window.started_s + level.window.ended_s) / 2
    return {
        "text": f"{number:g}" if is_narrow else level.title,
        "x": middle_s, "xref": "x", "y": 1, "yref": "paper",
        "yanchor": "bottom", "showarrow": False, "font": {"size": 12, "color": "#52606d"},
    }  # fmt: skip


def _distributions(analysis: Analysis) -> Chart:
    levels = analysis.results.results
    is_open_loop = bool(levels) and levels[0].is_open_loop
    names = [headline_name(n, is_open_loop=is_open_loop) for n in ("ttft", "tpot", "e2e")]
    names.append("chunk_gap")
    traces = []
    layout = _layout(
        620, grid={"rows": 2, "columns": 2, "pattern": "independent", "xgap": 0.16, "ygap": 0.3}
    )
    for number, name in enumerate(names, 1):
        axis = "" if number == 1 else str(number)
        metric = DISTRIBUTIONS[name]
        unit = metric.unit.replace("token", _token_word(levels).rstrip("s"))
        kind = (
            {"type": "log", "tickvals": LOG_TICKS}
            if name == "chunk_gap"
            else {"rangemode": "tozero"}
        )
        layout[f"xaxis{axis}"] = _axis(f"{metric.title}, {unit}", **kind)
        layout[f"yaxis{axis}"] = _axis("% at or below", range=[0, 101])
        traces += [
            _curve(analysis, index, name, axis, is_first=number == 1)
            for index in range(len(levels))
        ]
    text = (
        "For each level, how many per cent of the requests (of the gaps, in the last chart) took "
        "no longer than the time below: p95 is where a curve crosses 95 %. Steep is steady, a long "
        "flat end is a few that waited. Successes alone."
    )
    return Chart("distributions", "Distributions", text, traces, layout)


def _curve(
    analysis: Analysis, index: int, name: str, axis: str, *, is_first: bool
) -> dict[str, Any]:
    level, table = analysis.results.results[index], analysis.tables[index]
    rows = sent_in(table, Span(level.window.started_s, level.window.ended_s))
    samples = samples_of(table, name, rows) if level.token_source or name != "tpot" else []
    percents, values = _quantiles(np.asarray(samples, dtype=np.float64))
    if name == "chunk_gap":
        values = np.maximum(values, 0.01)
    title = level.title + (f", repeat {level.repeat + 1}" if level.repeat else "")
    return {
        "type": "scatter", "mode": "lines", "name": title, "legendgroup": str(index),
        "showlegend": is_first, "x": _rounded(values, 4), "y": _rounded(percents, 2),
        "xaxis": f"x{axis}", "yaxis": f"y{axis}",
        "line": {"color": COLOURS[index % len(COLOURS)], "width": 2, "shape": "hv"},
    }  # fmt: skip


def _quantiles(samples: Floats) -> tuple[Floats, Floats]:
    """Take the steps of the empirical distribution, at most a few hundred of them."""
    ordered = np.sort(samples)
    if not ordered.size:
        return np.empty(0), np.empty(0)
    num_points = min(ordered.size, MAX_CURVE_POINTS)
    ranks = np.unique(np.linspace(0, ordered.size - 1, num_points).round().astype(np.int64))
    return (ranks + 1) / ordered.size * 100.0, ordered[ranks]


def _errors(levels: Sequence[LevelFigures]) -> Chart | None:
    kinds = [kind for kind in ErrorKind if any(kind in level.errors for level in levels)]
    if not kinds and not any(level.num_cancelled for level in levels):
        return None
    titles = [level.title + " " * level.repeat for level in levels]
    traces = [
        {"type": "bar", "name": kind.value, "x": titles, "marker": {"color": ERROR_COLOURS[kind]},
         "y": [level.errors.get(kind, 0) for level in levels]}
        for kind in kinds
    ]  # fmt: skip
    cancelled = [level.num_cancelled for level in levels]
    if any(cancelled):
        traces.append(
            {"type": "bar", "name": "cancelled by us (no error)", "x": titles, "y": cancelled,
             "marker": {"color": GREY}}
        )  # fmt: skip
    layout = _layout(
        340,
        barmode="stack",
        bargap=0.5,
        showlegend=True,
        xaxis=_axis("level", type="category"),
        yaxis=_axis("requests", rangemode="tozero"),
    )
    text = "How many requests failed at each level, by kind. None was sent again."
    return Chart("errors", "Errors by kind", text, traces, layout)


def _stalls(analysis: Analysis) -> Chart:
    stalls = stall_map(analysis.tables)
    shown = slice(None, None, max(1, -(-stalls.request_sent_s.size // MAX_LIVES)))
    lives_x = _with_breaks(stalls.request_sent_s[shown], stalls.request_ended_s[shown])
    lives_y = _with_breaks(stalls.request_lane[shown], stalls.request_lane[shown])
    traces = [
        {"type": "scatter", "mode": "lines", "name": "a request, from send to end", "x": lives_x,
         "y": lives_y, "line": {"color": "#d5dae1", "width": 3}, "hoverinfo": "skip"},
        {"type": "scatter", "mode": "markers", "name": "a stall, at its end",
         "x": _rounded(stalls.ended_s), "y": _rounded(stalls.lane, 0),
         "customdata": _rounded(stalls.gap_ms, 1),
         "hovertemplate": "user %{y}: %{customdata} ms, until %{x} s<extra></extra>",
         "marker": {"symbol": "square", "size": 7, "color": _rounded(stalls.gap_ms, 1),
                    "colorscale": "YlOrRd", "reversescale": True,
                    "showscale": bool(stalls.gap_ms.size),
                    "colorbar": {"title": {"text": "stall, ms"}},
                    "line": {"width": 0.5, "color": "#7f1d1d"}}},
    ]  # fmt: skip
    is_open_loop = any(level.is_open_loop for level in analysis.results.results)
    layout = _layout(
        480,
        xaxis=_axis("seconds since the start of the run", rangemode="tozero"),
        yaxis=_axis(
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
    pairs = zip(_rounded(starts), _rounded(ends), strict=True)
    return [value for start, end in pairs for value in (start, end, None)]
