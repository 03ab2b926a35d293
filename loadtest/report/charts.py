"""Makes all charts of the page, in its order; the load, time, error and GPU charts are made here.

Charts contain only numbers and the tool's own names, no text from the server. So nothing in them
needs escaping.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.analysis.load_steps import LoadStep, load_steps
from loadtest.analysis.metric import DISTRIBUTIONS, headline_name
from loadtest.analysis.run_results import Analysis
from loadtest.report.chart import (
    BLUE,
    COLOURS,
    GREY,
    ORANGE,
    Chart,
    axis_of,
    layout_of,
    rounded,
    token_word,
)
from loadtest.report.distribution_chart import distribution_chart
from loadtest.report.stall_map import stall_chart
from loadtest.report.time_lines import time_lines
from loadtest.results.record import ErrorKind
from loadtest.results.summary import LevelFigures

ERROR_COLOURS = dict(
    zip(
        ErrorKind,
        ("#7f1d1d", "#d9822b", "#e6b84c", "#b5477f", "#3b6fb6", "#2a9fb5", "#7a5fb0", "#c0392b",
         "#8a6d3b", "#6b7280", "#2f8f5b", GREY),
        strict=True,
    )
)  # fmt: skip
MIN_TITLE_SHARE = 0.09
"""A level narrower than this share of the run is labelled with its number only."""


def make_charts(analysis: Analysis) -> list[Chart]:
    """Return the charts for which the run has data."""
    steps = load_steps(analysis.results.results)
    made = [
        _load_curve(steps) if len(steps) > 1 else None,
        _time_lines(analysis),
        distribution_chart(analysis),
        _errors(analysis.results.results),
        stall_chart(analysis),
        _gpus(analysis.run.header.gpus),
    ]
    return [chart for chart in made if chart]


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
    x_axis = axis_of(word, tickvals=load, type="log" if is_wide else "linear")
    layout = layout_of(
        380,
        grid={"rows": 1, "columns": 3, "pattern": "independent", "xgap": 0.22},
        xaxis=x_axis, yaxis=axis_of("successes per second", rangemode="tozero"),
        xaxis2=x_axis, yaxis2=axis_of(f"{ttft}, ms", rangemode="tozero"),
        xaxis3=x_axis, yaxis3=axis_of(f"{e2e}, s", rangemode="tozero"),
    )  # fmt: skip
    text = (
        f"Throughput and latency by {word}. Where the first curve flattens and the others rise, "
        "the server is full. Repeated levels are shown by their median."
    )
    return Chart("load", "Load against throughput and latency", text, traces, layout)


def _time_lines(analysis: Analysis) -> Chart:
    levels = analysis.results.results
    is_open_loop = bool(levels) and levels[0].is_open_loop
    lines = time_lines(analysis.tables, is_open_loop=is_open_loop)
    word = token_word(levels)
    ttft = DISTRIBUTIONS[headline_name("ttft", is_open_loop=is_open_loop)].title
    line = {"type": "scatter", "mode": "lines"}
    traces = [
        {**line, "name": "in flight", "x": rounded(lines.middle_s), "y": rounded(lines.in_flight),
         "line": {"color": BLUE, "shape": "hvh", "width": 1.5}},
        {**line, "name": f"{word}/s", "x": rounded(lines.middle_s),
         "y": rounded(lines.tokens_per_s), "yaxis": "y2",
         "line": {"color": COLOURS[2], "shape": "hvh", "width": 1.5}},
        {"type": "scatter", "mode": "markers", "name": f"{ttft} of each request", "yaxis": "y3",
         "x": rounded(lines.sent_s), "y": rounded(lines.ttft_ms),
         "marker": {"color": ORANGE, "size": 5, "opacity": 0.45}},
        {**line, "name": f"median {ttft}", "x": rounded(lines.median_s), "yaxis": "y3",
         "y": rounded(lines.median_ttft_ms), "line": {"color": "#8a4b0f", "width": 1.5}},
    ]  # fmt: skip
    layout = layout_of(
        640,
        grid={"rows": 3, "columns": 1, "subplots": [["xy"], ["xy2"], ["xy3"]], "ygap": 0.12},
        xaxis=axis_of("seconds since the start of the run", rangemode="tozero"),
        yaxis=axis_of("requests in flight", rangemode="tozero"),
        yaxis2=axis_of(f"{word}/s", rangemode="tozero"),
        yaxis3=axis_of(f"{ttft}, ms", rangemode="tozero"),
        shapes=[_band(level) for level in levels],
        annotations=[_band_title(level, analysis.duration_s) for level in levels],
    )
    layout["margin"]["t"] = 70
    layout["legend"]["y"] = 1.06
    text = (
        f"The whole run, in bins of {lines.bin_s:g} s. The shaded bands are the windows over which "
        "the figures are computed, one per level. Warm-up, ramp, and the time after a deadline are "
        "outside."
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
            {"type": "bar", "name": "cancelled by the tool (no error)", "x": titles, "y": cancelled,
             "marker": {"color": GREY}}
        )  # fmt: skip
    layout = layout_of(
        340,
        barmode="stack",
        bargap=0.5,
        showlegend=True,
        xaxis=axis_of("level", type="category"),
        yaxis=axis_of("requests", rangemode="tozero"),
    )
    text = "Failed requests at each level, by kind. No request is retried."
    return Chart("errors", "Errors by kind", text, traces, layout)


def _gpus(samples: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Draw each GPU's load, memory and power over time, from `gpu_monitor`'s samples."""
    if not samples:
        return None
    gpus = sorted({int(sample["gpu"]) for sample in samples})
    traces = [
        {"type": "scatter", "mode": "lines", "name": f"GPU {gpu}", "legendgroup": str(gpu),
         "showlegend": axis == "", "yaxis": f"y{axis}",
         "line": {"color": COLOURS[index % len(COLOURS)], "width": 1.5},
         "x": [sample["t_s"] for sample in samples if sample["gpu"] == gpu],
         "y": [sample[key] for sample in samples if sample["gpu"] == gpu]}
        for index, gpu in enumerate(gpus)
        for axis, key in (("", "utilization_percent"), ("2", "memory_mib"), ("3", "power_w"))
    ]  # fmt: skip
    layout = layout_of(
        560,
        grid={"rows": 3, "columns": 1, "subplots": [["xy"], ["xy2"], ["xy3"]], "ygap": 0.12},
        xaxis=axis_of("seconds since the start of the run", rangemode="tozero"),
        yaxis=axis_of("busy, %", range=[0, 101]),
        yaxis2=axis_of("memory, MiB", rangemode="tozero"),
        yaxis3=axis_of("power, W", rangemode="tozero"),
    )
    text = (
        "Sampled with nvidia-smi once a second on the machine that sent the load; useful if the "
        "server runs on it too."
    )
    return Chart("gpus", "GPUs", text, traces, layout)
