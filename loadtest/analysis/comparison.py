"""Compares two runs level by level: what changed, with which confidence, and whether it is worse.

A figure counts as worse only if its whole 95 % interval is beyond the tolerance, so noise is not
reported as a regression. Runs that count tokens in different ways are not compared.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.analysis.bootstrap import (
    Interval,
    interval,
    mean_draws,
    percentile_draws,
    relative_change,
)
from loadtest.analysis.level_figures import level_title, single_source
from loadtest.analysis.load_samples import Load, LoadSamples, samples_by_load
from loadtest.analysis.metric import DISTRIBUTIONS, SCALARS, headline_name
from loadtest.results.record import TokenSource
from loadtest.results.run import Run, RunError

TOLERANCE = 0.05
ERROR_TOLERANCE = 0.005
"""The tolerance of the error rate, as an absolute difference, not a relative one."""
SEED = 0
ChangeKind = Literal["worse", "better", "same", "unclear", "unknown"]
COMPARED = (("ttft", 50), ("ttft", 95), ("tpot", 50), ("tpot", 95), ("e2e", 50), ("e2e", 95),
            ("max_stall", 95))  # fmt: skip
RELEVANT_KEYS = (
    "api", "model", "max_tokens", "temperature", "data", "order", "seed", "unique", "images",
    "users", "arrival", "max_inflight", "interval", "ramp", "warmup", "duration", "loops",
    "requests",
)  # fmt: skip


class ComparisonError(RunError):
    """Runs that can't be compared; the message says why."""


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of one level in both runs.

    Attributes:
        level: The level's title.
        figure: The figure's title, such as "TTFT p95".
        unit: The unit of both values.
        before: The value in the first run.
        after: The value in the second run.
        amount: after / before - 1; for the error rate, after - before.
        interval: The 95 % interval of `amount`; None for too few samples.
        kind: "worse" or "better" if the whole interval is beyond the tolerance, "same" if it is
            within, "unclear" if it is partly beyond, "unknown" without an interval.
    """

    level: str
    figure: str
    unit: str
    before: float
    after: float
    amount: float
    interval: Interval | None
    kind: ChangeKind


@dataclass(frozen=True, slots=True)
class Comparison:
    """The changes between two runs.

    Attributes:
        before: The first run's directory.
        after: The second run's directory.
        changes: All compared figures, in the order of the levels.
        remarks: Other differences between the runs, such as settings and unshared levels.
    """

    before: str
    after: str
    changes: tuple[Change, ...]
    remarks: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """99 if anything is worse, else 0."""
        return 99 if any(change.kind == "worse" for change in self.changes) else 0

    def render(self, console: Console) -> None:
        """Print a table of all figures, the remarks, and a summary."""
        table = Table(title=f"A: {self.before}\nB: {self.after}", title_justify="left")
        for name in ("level", "figure", "A", "B", "change", "95 % interval", ""):
            table.add_column(name, justify="left" if name in ("level", "figure", "") else "right")
        styles = {"worse": "red", "better": "green", "same": "", "unclear": "", "unknown": "dim"}
        for change in self.changes:
            table.add_row(*_cells(change), Text(change.kind, styles[change.kind]))
        console.print(table)
        for remark in self.remarks:
            console.print(f"Note: {remark}", markup=False, highlight=False, soft_wrap=True)
        console.print(self.sentence, markup=False, highlight=False, soft_wrap=True)

    @property
    def sentence(self) -> str:
        """Summarize the comparison in a sentence."""
        worse = [f"{change.figure} at {change.level}" for change in self.changes
                 if change.kind == "worse"]  # fmt: skip
        counts = Counter(change.kind for change in self.changes)
        others = ", ".join(f"{count} {kind}" for kind, count in counts.items() if kind != "worse")
        if worse:
            return f"REGRESSION in B: {', '.join(worse)}; other figures: {others or 'none'}."
        return f"No regression in B was found. Figures: {others}."


def _cells(change: Change) -> tuple[Text, ...]:
    is_share = change.unit == ""
    values = [f"{v:.1%}" if is_share else f"{v:,.4g} {change.unit}"
              for v in (change.before, change.after)]  # fmt: skip
    spread = change.interval
    shown = f"{spread.low:+.1%} to {spread.high:+.1%}" if spread else "too few samples"
    texts = (change.level, change.figure, *values, f"{change.amount:+.1%}", shown)
    return tuple(Text(text) for text in texts)


def compare(run_a: Run, run_b: Run, *, tolerance: float = TOLERANCE) -> Comparison:
    """Compare two runs, level by level.

    Args:
        run_a: The baseline.
        run_b: The run to compare with it.
        tolerance: The largest relative change that counts as "same".

    Raises:
        ComparisonError: Tokens were counted in different ways, or the runs share no level.
    """
    sides_a, sides_b = samples_by_load(run_a), samples_by_load(run_b)
    _check_token_sources(run_a, sides_a, run_b, sides_b)
    shared = [load for load in sides_a if load in sides_b]
    if not shared:
        raise ComparisonError(
            f"{run_a.path} and {run_b.path} share no level: "
            f"{_titles(sides_a.values())} and {_titles(sides_b.values())}"
        )
    changes = [d for load in shared for d in _changes(sides_a[load], sides_b[load], tolerance)]
    remarks = (
        *_early_ends(run_a, run_b),
        *_different_settings(run_a, run_b),
        *_unshared(sides_a, sides_b),
    )
    return Comparison(str(run_a.path), str(run_b.path), tuple(changes), remarks)


def _check_token_sources(
    run_a: Run, sides_a: dict[Load, LoadSamples], run_b: Run, sides_b: dict[Load, LoadSamples]
) -> None:
    sources = []
    for run, sides in ((run_a, sides_a), (run_b, sides_b)):
        found = {single_source(t) for side in sides.values() for t in side.tables
                 if t.is_success.any()}  # fmt: skip
        if len(found) != 1 or None in found:
            what = "counts its tokens in different ways" if found else "has no successful request"
            raise ComparisonError(f"{run.path} {what}, so it can't be compared")
        sources.append(next(iter(found)))
    if sources[0] is not sources[1]:
        raise ComparisonError(
            f"different token sources: {run_a.path} has {sources[0]}, {run_b.path} {sources[1]}; "
            "their figures can't be compared"
        )


def _changes(side_a: LoadSamples, side_b: LoadSamples, tolerance: float) -> list[Change]:
    generator = np.random.default_rng(SEED)
    title = level_title(side_a.levels[0])
    changes = []
    for plain_name, percent in COMPARED:
        name = headline_name(plain_name, is_open_loop=side_a.is_open_loop)
        metric = DISTRIBUTIONS[name]
        samples = side_a.samples(name), side_b.samples(name)
        if not samples[0].size or not samples[1].size:
            continue
        values = [float(np.percentile(s, percent)) for s in samples]
        draws = [percentile_draws(s, percent, generator) for s in samples]
        found = relative_change(*draws)
        changes.append(
            _change(title, f"{metric.title} p{percent}", metric.unit, values, found, tolerance)
        )
    return [
        *changes,
        *_rate_changes(title, side_a, side_b, tolerance, generator),
        *_error_changes(title, side_a, side_b, generator),
    ]


def _rate_changes(
    title: str,
    side_a: LoadSamples,
    side_b: LoadSamples,
    tolerance: float,
    generator: np.random.Generator,
) -> list[Change]:
    chunks = side_a.tables[0].records and single_source(side_a.tables[0]) is TokenSource.CHUNKS
    output_unit = "chunks/s" if chunks else "tok/s"
    changes = []
    for metric, unit, rates in (
        (SCALARS["output"], output_unit, (side_a.output_rates(), side_b.output_rates())),
        (SCALARS["qps"], "1/s", (side_a.success_rates(), side_b.success_rates())),
    ):
        if not rates[0].size or not rates[1].size:
            continue
        values = [float(rate.mean()) for rate in rates]
        found = relative_change(*(mean_draws(rate, generator) for rate in rates))
        changes.append(_change(title, metric.title, unit, values, found, tolerance, better_sign=1))
    return changes


def _error_changes(
    title: str,
    side_a: LoadSamples,
    side_b: LoadSamples,
    generator: np.random.Generator,
) -> list[Change]:
    failures = side_a.is_failure(), side_b.is_failure()
    if not failures[0].size or not failures[1].size:
        return []
    before, after = (float(f.mean()) for f in failures)
    draws = [mean_draws(f, generator) for f in failures]
    found = interval(draws[1] - draws[0]) if draws[0].size and draws[1].size else None
    kind = _kind_of(found, ERROR_TOLERANCE, better_sign=-1)
    metric = SCALARS["error_rate"]
    return [Change(title, metric.title, "", before, after, after - before, found, kind)]


def _change(
    title: str,
    figure: str,
    unit: str,
    values: Sequence[float],
    found: Interval | None,
    tolerance: float,
    better_sign: Literal[1, -1] = -1,
) -> Change:
    before, after = values
    amount = after / before - 1 if before else 0.0 if not after else float("inf")
    kind = _kind_of(found, tolerance, better_sign)
    return Change(title, figure, unit, before, after, amount, found, kind)


def _kind_of(found: Interval | None, tolerance: float, better_sign: Literal[1, -1]) -> ChangeKind:
    """Classify the interval of a change; `better_sign` is the sign of an improvement."""
    if found is None:
        return "unknown"
    low, high = sorted((found.low * better_sign, found.high * better_sign))
    if high < -tolerance or low > tolerance:
        return "worse" if high < -tolerance else "better"
    return "same" if low >= -tolerance and high <= tolerance else "unclear"


def _early_ends(run_a: Run, run_b: Run) -> list[str]:
    return [
        f"{name} did not run to its end ({run.header.status})."
        for name, run in (("A", run_a), ("B", run_b))
        if run.header.status != "finished"
    ]


def _different_settings(run_a: Run, run_b: Run) -> list[str]:
    return [
        f"{key} differs: {run_a.configuration.get(key)!r} and {run_b.configuration.get(key)!r}."
        for key in RELEVANT_KEYS
        if run_a.configuration.get(key) != run_b.configuration.get(key)
    ]


def _unshared(sides_a: dict[Load, LoadSamples], sides_b: dict[Load, LoadSamples]) -> list[str]:
    pairs = (("A", sides_a, sides_b), ("B", sides_b, sides_a))
    return [
        f"only {name} has {level_title(side.levels[0])}."
        for name, sides, others in pairs
        for load, side in sides.items()
        if load not in others
    ]


def _titles(sides: Iterable[LoadSamples]) -> str:
    return ", ".join(level_title(side.levels[0]) for side in sides) or "nothing"
