"""Two runs beside each other, level by level: what changed, how surely, and whether it is worse.

A figure is worse only if its whole 95 % interval lies beyond the tolerance, so that noise is no
regression. Runs whose tokens were counted differently are refused.
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
from loadtest.record import TokenSource
from loadtest.run import Run, RunError

TOLERANCE = 0.05
ERROR_TOLERANCE = 0.005
"""Of the error rate's change, in itself: five more of a hundred that fail are no noise."""
SEED = 0
Outcome = Literal["worse", "better", "same", "unclear", "unknown"]
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
class Delta:
    """One figure of one level in both runs.

    Attributes:
        level: The level's title.
        figure: The figure's, such as "TTFT p95".
        unit: Of both values.
        before: In the first run.
        after: In the second.
        change: after / before - 1; for the error rate, after - before.
        interval: Of `change`, at 95 %; None for too few samples.
        outcome: "same" only if the whole interval lies within the tolerance, "unclear" if it
            reaches beyond, "unknown" without an interval.
    """

    level: str
    figure: str
    unit: str
    before: float
    after: float
    change: float
    interval: Interval | None
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Comparison:
    """What changed between two runs.

    Attributes:
        before: The first run's directory.
        after: The second's.
        deltas: In the order of the levels.
        remarks: What else differs between the runs, or is in one of them alone.
    """

    before: str
    after: str
    deltas: tuple[Delta, ...]
    remarks: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """99 if anything is worse, else 0."""
        return 99 if any(delta.outcome == "worse" for delta in self.deltas) else 0

    def render(self, console: Console) -> None:
        """Print a table of all figures, and a sentence that sums it up."""
        table = Table(title=f"A: {self.before}\nB: {self.after}", title_justify="left")
        for name in ("level", "figure", "A", "B", "change", "95 % interval", ""):
            table.add_column(name, justify="left" if name in ("level", "figure", "") else "right")
        styles = {"worse": "red", "better": "green", "same": "", "unclear": "", "unknown": "dim"}
        for delta in self.deltas:
            table.add_row(*_cells(delta), Text(delta.outcome, styles[delta.outcome]))
        console.print(table)
        for remark in self.remarks:
            console.print(f"Note: {remark}", markup=False, highlight=False, soft_wrap=True)
        console.print(self.sentence, markup=False, highlight=False, soft_wrap=True)

    @property
    def sentence(self) -> str:
        """Sum it up."""
        worse = [f"{delta.figure} at {delta.level}" for delta in self.deltas
                 if delta.outcome == "worse"]  # fmt: skip
        counts = Counter(delta.outcome for delta in self.deltas)
        told = ", ".join(
            f"{count} {outcome}" for outcome, count in counts.items() if outcome != "worse"
        )
        if worse:
            return f"REGRESSION in B: {', '.join(worse)}; of the other figures: {told or 'none'}."
        return f"No regression in B can be shown. Figures: {told}."


def _cells(delta: Delta) -> tuple[Text, ...]:
    is_share = delta.unit == ""
    values = [f"{v:.1%}" if is_share else f"{v:,.4g} {delta.unit}"
              for v in (delta.before, delta.after)]  # fmt: skip
    spread = delta.interval
    shown = f"{spread.low:+.1%} to {spread.high:+.1%}" if spread else "too few samples"
    texts = (delta.level, delta.figure, *values, f"{delta.change:+.1%}", shown)
    return tuple(Text(text) for text in texts)


def compare(run_a: Run, run_b: Run, *, tolerance: float = TOLERANCE) -> Comparison:
    """Compare two runs, level by level.

    Args:
        run_a: The one to judge by.
        run_b: The one to judge.
        tolerance: A change up to this share is none.

    Raises:
        ComparisonError: Tokens were counted differently, or no level is in both.
    """
    sides_a, sides_b = samples_by_load(run_a), samples_by_load(run_b)
    _refuse_unlike_sources(run_a, sides_a, run_b, sides_b)
    shared = [load for load in sides_a if load in sides_b]
    if not shared:
        raise ComparisonError(
            f"{run_a.path} and {run_b.path} share no level: "
            f"{_titles(sides_a.values())} and {_titles(sides_b.values())}"
        )
    deltas = [d for load in shared for d in _deltas(sides_a[load], sides_b[load], tolerance)]
    remarks = (
        *_early_ends(run_a, run_b),
        *_unlike_settings(run_a, run_b),
        *_unshared(sides_a, sides_b),
    )
    return Comparison(str(run_a.path), str(run_b.path), tuple(deltas), remarks)


def _refuse_unlike_sources(
    run_a: Run, sides_a: dict[Load, LoadSamples], run_b: Run, sides_b: dict[Load, LoadSamples]
) -> None:
    sources = []
    for run, sides in ((run_a, sides_a), (run_b, sides_b)):
        found = {single_source(t) for side in sides.values() for t in side.tables
                 if t.is_success.any()}  # fmt: skip
        if len(found) != 1 or None in found:
            what = "counts its tokens in different ways" if found else "has no success"
            raise ComparisonError(f"{run.path} {what}, so it can't be compared")
        sources.append(next(iter(found)))
    if sources[0] is not sources[1]:
        raise ComparisonError(
            f"unlike token sources: {run_a.path} has {sources[0]}, {run_b.path} {sources[1]}; "
            "their figures mean different things"
        )


def _deltas(side_a: LoadSamples, side_b: LoadSamples, tolerance: float) -> list[Delta]:
    generator = np.random.default_rng(SEED)
    title = level_title(side_a.levels[0])
    deltas = []
    for plain_name, percent in COMPARED:
        name = headline_name(plain_name, is_open_loop=side_a.is_open_loop)
        metric = DISTRIBUTIONS[name]
        samples = side_a.samples(name), side_b.samples(name)
        if not samples[0].size or not samples[1].size:
            continue
        values = [float(np.percentile(s, percent)) for s in samples]
        draws = [percentile_draws(s, percent, generator) for s in samples]
        found = relative_change(*draws)
        deltas.append(
            _delta(title, f"{metric.title} p{percent}", metric.unit, values, found, tolerance)
        )
    return [
        *deltas,
        *_rate_deltas(title, side_a, side_b, tolerance, generator),
        *_error_delta(title, side_a, side_b, generator),
    ]


def _rate_deltas(
    title: str,
    side_a: LoadSamples,
    side_b: LoadSamples,
    tolerance: float,
    generator: np.random.Generator,
) -> list[Delta]:
    chunks = side_a.tables[0].records and single_source(side_a.tables[0]) is TokenSource.CHUNKS
    output_unit = "chunks/s" if chunks else "tok/s"
    deltas = []
    for metric, unit, rates in (
        (SCALARS["output"], output_unit, (side_a.output_rates(), side_b.output_rates())),
        (SCALARS["qps"], "1/s", (side_a.success_rates(), side_b.success_rates())),
    ):
        if not rates[0].size or not rates[1].size:
            continue
        values = [float(rate.mean()) for rate in rates]
        found = relative_change(*(mean_draws(rate, generator) for rate in rates))
        deltas.append(_delta(title, metric.title, unit, values, found, tolerance, is_better=1))
    return deltas


def _error_delta(
    title: str,
    side_a: LoadSamples,
    side_b: LoadSamples,
    generator: np.random.Generator,
) -> list[Delta]:
    failures = side_a.is_failure(), side_b.is_failure()
    if not failures[0].size or not failures[1].size:
        return []
    before, after = (float(f.mean()) for f in failures)
    draws = [mean_draws(f, generator) for f in failures]
    found = interval(draws[1] - draws[0]) if draws[0].size and draws[1].size else None
    outcome = _outcome(found, ERROR_TOLERANCE, is_better=-1)
    metric = SCALARS["error_rate"]
    return [Delta(title, metric.title, "", before, after, after - before, found, outcome)]


def _delta(
    title: str,
    figure: str,
    unit: str,
    values: Sequence[float],
    found: Interval | None,
    tolerance: float,
    is_better: Literal[1, -1] = -1,
) -> Delta:
    before, after = values
    change = after / before - 1 if before else 0.0 if not after else float("inf")
    outcome = _outcome(found, tolerance, is_better)
    return Delta(title, figure, unit, before, after, change, found, outcome)


def _outcome(found: Interval | None, tolerance: float, is_better: Literal[1, -1]) -> Outcome:
    """Judge an interval of change; `is_better` is the sign of a change for the better."""
    if found is None:
        return "unknown"
    low, high = sorted((found.low * is_better, found.high * is_better))
    if high < -tolerance or low > tolerance:
        return "worse" if high < -tolerance else "better"
    return "same" if low >= -tolerance and high <= tolerance else "unclear"


def _early_ends(run_a: Run, run_b: Run) -> list[str]:
    return [
        f"{name} ended before its time ({run.header.status})."
        for name, run in (("A", run_a), ("B", run_b))
        if run.header.status != "finished"
    ]


def _unlike_settings(run_a: Run, run_b: Run) -> list[str]:
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
