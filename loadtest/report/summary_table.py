"""The table of figures per level, for the terminal, `summary.csv` and the page."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.analysis.metric import DISTRIBUTIONS, STATISTICS, headline_name
from loadtest.results.summary import LevelFigures, RunResults

UNKNOWN = "-"
TITLE_WIDTH = 30
LEVEL_WIDTH = 16


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table.

    Attributes:
        title: The heading, with its unit.
        meaning: How the figure is computed, in one line.
        value: Returns a level's cell.
    """

    title: str
    meaning: str
    value: Callable[[LevelFigures], str]


def _number(value: float | None, digits: int = 1) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def _percentile(name: str, statistic: str, digits: int) -> Callable[[LevelFigures], str]:
    def value(level: LevelFigures) -> str:
        key = DISTRIBUTIONS[headline_name(name, is_open_loop=level.is_open_loop)].key
        found = level.window.distributions.get(key)
        return _number(getattr(found, statistic) if found else None, digits)

    return value


def columns(levels: Sequence[LevelFigures]) -> list[Column]:
    """Return the columns for these levels; SLOs and repetitions only if there are any."""
    word = "chunks" if levels and levels[0].token_word == "chunks" else "tok"
    is_open_loop = bool(levels) and levels[0].is_open_loop
    shown = [
        Column("load", "users, or requests scheduled per second", lambda level: level.title),
        Column("attempts", "sent in the window", lambda level: f"{level.num_attempts:,}"),
        Column("errors", "failed / attempts not cancelled", lambda level: _share(level.error_rate)),
        Column("QPS", "successes that ended in the window / window, 1/s",
               lambda level: _number(level.window.qps, 2)),
        Column(f"{word}/s", f"{word} read in the window / window",
               lambda level: _number(level.window.output_tokens_per_s)),
    ]  # fmt: skip
    if not is_open_loop:
        shown.append(
            Column(
                f"steady {word}/s",
                "the same, while at least 95 % of the users were busy",
                lambda level: _number(level.steady.output_tokens_per_s if level.steady else None),
            )
        )
    if any(level.repeat for level in levels):
        shown.insert(
            1, Column("repeat", "repetition of the sweep", lambda level: str(level.repeat + 1))
        )
    if any(level.slo_attainment is not None for level in levels):
        shown += [
            Column("goodput /s", "successes that met every SLO / window",
                   lambda level: _number(level.window.goodput, 2)),
            Column("SLO met", "good requests / all attempts, including those due but never sent",
                   lambda level: _share(level.slo_attainment)),
        ]  # fmt: skip
    for name, unit, statistics, digits in (
        ("ttft", "ms", ("p50", "p95", "p99"), 0),
        ("tpot", "ms", ("p50", "p95"), 1),
        ("e2e", "s", ("p50", "p95"), 2),
        ("max_stall", "ms", ("p95",), 0),
    ):
        metric = DISTRIBUTIONS[headline_name(name, is_open_loop=is_open_loop)]
        shown += [
            Column(f"{metric.title} {statistic}, {unit}", metric.meaning,
                   _percentile(name, statistic, digits))
            for statistic in statistics
        ]  # fmt: skip
    return shown


def render(results: RunResults, console: Console) -> None:
    """Print the figures of all levels, then the findings and the verdict."""
    num_columns = max(1, (console.width - TITLE_WIDTH) // LEVEL_WIDTH)
    for first in range(0, len(results.results), num_columns):
        console.print(_table(results.results, results.results[first : first + num_columns]))
    for sentence in (*results.findings, *results.verdict.sentences):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def _table(levels: Sequence[LevelFigures], shown: Sequence[LevelFigures]) -> Table:
    """Make a table with some levels as columns and one figure per row, to fit a terminal."""
    title, *figures = columns(levels)
    table = Table(show_edge=False, pad_edge=False)
    table.add_column(title.title)
    for level in shown:
        table.add_column(title.value(level), justify="right", no_wrap=True)
    for figure in figures:
        table.add_row(figure.title, *(figure.value(level) for level in shown))
    return table


def write_csv(path: Path, levels: Sequence[LevelFigures]) -> None:
    """Write one line per level with all figures unrounded and units in the column names."""
    rows = [_csv_row(level) for level in levels]
    names = list(dict.fromkeys(name for row in rows for name in row)) or ["level"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def _csv_row(level: LevelFigures) -> dict[str, Any]:
    row: dict[str, Any] = {
        "level": level.index,
        "repeat": level.repeat,
        "num_queues": level.num_queues,
        "rate_per_s": level.rate_per_s,
        "token_source": level.token_source,
        "num_attempts": level.num_attempts,
        "num_successes": level.num_successes,
        "num_errors": level.num_errors,
        "num_cancelled": level.num_cancelled,
        "num_unsent": level.num_unsent,
        "error_rate": level.error_rate,
        "slo_attainment": level.slo_attainment,
        "window_s": level.window.duration_s,
        "qps": level.window.qps,
        "goodput_per_s": level.window.goodput,
        f"output_{level.token_word}_per_s": level.window.output_tokens_per_s,
        "steady_s": level.steady.duration_s if level.steady else None,
        "steady_qps": level.steady.qps if level.steady else None,
        f"steady_output_{level.token_word}_per_s": (
            level.steady.output_tokens_per_s if level.steady else None
        ),
        "cpu_share": level.cpu_share,
        "lag_ms_p95": level.lag_ms.p95,
        "lag_ms_p99": level.lag_ms.p99,
    }
    for key, found in level.window.distributions.items():
        row |= {f"{key}_n": found.n}
        row |= {f"{key}_{statistic}": getattr(found, statistic) for statistic in STATISTICS}
    return row | {f"errors_{kind}": count for kind, count in level.errors.items()}
