"""Checks a run against `--fail-if` and `--max-error-rate`, and gives the verdict.

An expression is `FIGURE.STATISTIC OPERATOR NUMBER`, like `ttft.p95>2000` or `error_rate>0.01`. The
run fails if it holds. Times are in ms unless the number ends with `s`. A figure that is not
available, such as the p99 of few samples, also fails the run.
"""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from loadtest.analysis.metric import DISTRIBUTIONS, MIN_SAMPLES_FOR_P99, SCALARS, STATISTICS
from loadtest.results.summary import LevelFigures, Outcome

OPERATORS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
EXPRESSION: Final = re.compile(
    r"(?P<name>[a-z_0-9]+)(?:\.(?P<statistic>[a-z0-9]+))?\s*(?P<operator>>=|<=|>|<)\s*"
    r"(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(?P<unit>ms|s)?",
)


class ThresholdError(ValueError):
    """An expression can't be parsed; the message says what is allowed."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A condition that fails the run.

    Attributes:
        text: The expression as written.
        name: The name of a distribution or a scalar.
        statistic: One of `STATISTICS`; None for a scalar.
        operator: One of `OPERATORS`.
        limit: The limit, in ms if the figure is a time.
    """

    text: str
    name: str
    statistic: str | None
    operator: str
    limit: float


def parse_threshold(text: str) -> Threshold:
    """Parse an expression.

    Raises:
        ThresholdError: The text is not an expression, or names an unknown figure or statistic.
    """
    match = EXPRESSION.fullmatch(text.strip())
    if not match:
        raise ThresholdError(
            f"--fail-if {text!r}: write it as FIGURE.STATISTIC OPERATOR NUMBER, "
            "like 'ttft.p95>2000'; times are in ms"
        )
    name, statistic = match["name"], match["statistic"]
    _check_names(text, name, statistic)
    if match["unit"] and name in SCALARS:
        raise ThresholdError(
            f"--fail-if {text!r}: {name} is not a time; leave out {match['unit']!r}"
        )
    limit = float(match["number"]) * (1000.0 if match["unit"] == "s" else 1.0)
    return Threshold(text.strip(), name, statistic, match["operator"], limit)


def _check_names(text: str, name: str, statistic: str | None) -> None:
    if name not in DISTRIBUTIONS and name not in SCALARS:
        known = [f"{known}.p95" for known in DISTRIBUTIONS] + list(SCALARS)
        raise ThresholdError(
            f"--fail-if {text!r}: there is no figure {name!r}; there are {', '.join(known)}"
        )
    if name in SCALARS and statistic:
        raise ThresholdError(f"--fail-if {text!r}: {name} is one number; leave out .{statistic}")
    if name in DISTRIBUTIONS and statistic not in STATISTICS:
        raise ThresholdError(
            f"--fail-if {text!r}: {name} needs one of .{', .'.join(STATISTICS)}, as in {name}.p95"
        )


def figure_of(level: LevelFigures, name: str, statistic: str | None) -> float | None:
    """Return a figure, times in ms; None if it is not available."""
    if statistic is None:
        return {
            "output": level.window.output_tokens_per_s,
            "qps": level.window.qps,
            "goodput": level.window.goodput,
            "slo_attainment": level.slo_attainment,
            "error_rate": level.error_rate,
        }[name]
    metric = DISTRIBUTIONS[name]
    found = level.window.distributions.get(metric.key)
    value: float | None = getattr(found, statistic) if found else None
    return None if value is None else value * metric.ms_per_unit


def judge(
    levels: Sequence[LevelFigures], thresholds: Sequence[Threshold], max_error_rate: float
) -> Outcome:
    """Return the verdict on all levels.

    Too many errors take precedence: if most requests failed, the latencies of the others mean
    little.
    """
    failures = [line for level in levels for line in _error_failures(level, max_error_rate)]
    if not levels:
        failures = ["FAILED: no request was sent."]
    crossed, passed = [], []
    for threshold in thresholds:
        lines = [s for level in levels for s in _crossed(level, threshold, len(levels) > 1)]
        crossed += lines
        passed += [] if lines else [f"Passed: {threshold.text} at no level."]
    return Outcome(
        exit_code=1 if failures else 99 if crossed else 0,
        sentences=(*failures, *crossed, *passed),
    )


def _error_failures(level: LevelFigures, max_error_rate: float) -> list[str]:
    if not level.num_attempts and level.num_warmup:
        return [
            f"FAILED: {level.title}: no request was sent after warm-up and ramp, so none counts."
        ]
    if not level.num_successes:
        return [f"FAILED: {level.title}: no request succeeded."]
    if level.error_rate is not None and level.error_rate > max_error_rate:
        return [
            f"FAILED: {level.title}: {level.error_rate:.1%} of the requests failed; "
            f"{max_error_rate:.1%} are allowed."
        ]
    return []


def _crossed(level: LevelFigures, threshold: Threshold, is_sweep: bool) -> list[str]:
    value = figure_of(level, threshold.name, threshold.statistic)
    where = f"{level.title}: " if is_sweep else ""
    if value is None:
        return [
            f"FAILED: {where}{threshold.text} can't be checked{_why_unknown(level, threshold)}."
        ]
    if not OPERATORS[threshold.operator](value, threshold.limit):
        return []
    unit = " ms" if threshold.statistic else ""
    figure = threshold.name + (f".{threshold.statistic}" if threshold.statistic else "")
    return [f"FAILED: {where}{figure} is {value:.4g}{unit}: {threshold.text}."]


def _why_unknown(level: LevelFigures, threshold: Threshold) -> str:
    if threshold.statistic == "p99":
        return f" with {level.num_successes} successes; p99 needs {MIN_SAMPLES_FOR_P99} samples"
    if threshold.name in ("goodput", "slo_attainment"):
        return " without --slo"
    return ""
