"""All that a run shows: figures of each level, what they say, and the verdict on them."""

from dataclasses import dataclass
from typing import Any, Literal

from loadtest.analysis.findings import find
from loadtest.analysis.level_figures import level_figures
from loadtest.analysis.objectives import Objective, parse_objective
from loadtest.analysis.request_table import RequestTable, build_table
from loadtest.run import Run, RunError
from loadtest.summary import RunResults
from loadtest.thresholds import Threshold, judge, parse_threshold


@dataclass(frozen=True, slots=True)
class Analysis:
    """A run's results, and the columns they come from.

    Attributes:
        run: As read.
        tables: One for each level.
        objectives: As the configuration has them.
        results: What is told.
    """

    run: Run
    tables: tuple[RequestTable, ...]
    objectives: tuple[Objective, ...]
    results: RunResults

    @property
    def duration_s(self) -> float:
        """From the start of the run to the end of its last request."""
        return max((record.ended_s for record in self.run.records), default=0.0)


def analyse(run: Run) -> Analysis:
    """Compute all that a run shows.

    Raises:
        RunError: The configuration's `slo` or `fail_if` can't be read.
    """
    try:
        objectives = configured_objectives(run.configuration)
        thresholds = configured_thresholds(run.configuration)
    except ValueError as error:
        raise RunError(f"{run.path}: the configuration in its summary: {error}") from error
    tables = tuple(build_table(run.records_of(level)) for level in run.levels)
    pairs = zip(run.levels, tables, strict=True)
    levels = tuple(level_figures(level, table, objectives) for level, table in pairs)
    max_error_rate = float(run.configuration.get("max_error_rate") or 0.0)
    results = RunResults(
        status=_status(run),
        results=levels,
        findings=(*_ending(run), *find(levels, tables, objectives)),
        verdict=judge(levels, thresholds, max_error_rate),
    )
    return Analysis(run, tables, objectives, results)


def configured_objectives(configuration: dict[str, Any]) -> tuple[Objective, ...]:
    """Read `slo`, a list of texts like "ttft:2000"."""
    return tuple(parse_objective(str(text)) for text in configuration.get("slo") or ())


def configured_thresholds(configuration: dict[str, Any]) -> tuple[Threshold, ...]:
    """Read `fail_if`, a list of expressions."""
    return tuple(parse_threshold(str(text)) for text in configuration.get("fail_if") or ())


def _status(run: Run) -> Literal["finished", "stopped", "interrupted"]:
    if run.header.status in ("running", "interrupted"):
        return "interrupted"
    is_stopped = run.header.status == "stopped" or any(level.was_stopped for level in run.levels)
    return "stopped" if is_stopped else "finished"


def _ending(run: Run) -> list[str]:
    told = {
        "stopped": "The run was stopped before its end; these are the figures until then.",
        "interrupted": "The tool ended before the run did; these are the figures until then.",
    }
    return [told[status]] if (status := _status(run)) in told else []
