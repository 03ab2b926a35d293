"""Draws charts as PNG files, with matplotlib and without a display."""

from pathlib import Path

from matplotlib.figure import Figure

from loadtest.analysis.load_steps import LoadStep, load_steps
from loadtest.analysis.run_results import Analysis
from loadtest.report.time_lines import time_lines

DPI = 150


def write_plots(run_dir: Path, analysis: Analysis) -> list[Path]:
    """Draw `timelines.png` and, for a sweep, `load.png`.

    Returns:
        The paths of the files.
    """
    written = [_save(run_dir / "timelines.png", _draw_time_lines(analysis))]
    steps = load_steps(analysis.results.results)
    if len(steps) > 1:
        written.append(_save(run_dir / "load.png", _draw_load(steps)))
    return written


def _save(path: Path, figure: Figure) -> Path:
    figure.savefig(path, format="png")
    return path


def _draw_time_lines(analysis: Analysis) -> Figure:
    levels = analysis.results.results
    lines = time_lines(analysis.tables, is_open_loop=bool(levels) and levels[0].is_open_loop)
    figure = Figure(figsize=(10, 7), dpi=DPI, layout="constrained")
    in_flight, tokens, ttft = figure.subplots(3, 1, sharex=True)
    in_flight.plot(lines.middle_s, lines.in_flight, color="#3b6fb6", drawstyle="steps-mid")
    in_flight.set_ylabel("requests in flight")
    tokens.plot(lines.middle_s, lines.tokens_per_s, color="#2f8f5b", drawstyle="steps-mid")
    tokens.set_ylabel(f"{levels[0].token_word if levels else 'tokens'}/s")
    ttft.plot(lines.sent_s, lines.ttft_ms, ".", color="#d9822b", alpha=0.5)
    ttft.plot(lines.median_s, lines.median_ttft_ms, color="#8a4b0f")
    ttft.set_ylabel("TTFT, ms")
    ttft.set_xlabel("seconds since the start of the run")
    for axes in (in_flight, tokens, ttft):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        for level in levels:
            axes.axvspan(level.window.started_s, level.window.ended_s, alpha=0.06)
    return figure


def _draw_load(steps: list[LoadStep]) -> Figure:
    load = [step.load for step in steps]
    figure = Figure(figsize=(12, 4), dpi=DPI, layout="constrained")
    rps, ttft, e2e = figure.subplots(1, 3)
    rps.plot(load, [step.median_of(lambda level: level.window.qps) for step in steps], "o-")
    rps.set_ylabel("successes per second")
    for axes, name, unit in ((ttft, "ttft", "ms"), (e2e, "e2e", "s")):
        for statistic in ("p50", "p95"):
            axes.plot(load, [step.latency(name, statistic) for step in steps], "o-",
                      label=statistic)  # fmt: skip
        axes.set_ylabel(f"{name.upper()}, {unit}")
        axes.legend()
    for axes in (rps, ttft, e2e):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.set_xlabel("requests scheduled per second" if steps[0].is_open_loop else "users")
    return figure
