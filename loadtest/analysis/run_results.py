"""Analyses a run: the figures of each level, the findings, and the verdict."""

from dataclasses import dataclass
from typing import Any, Literal

from loadtest.analysis.findings import find
from loadtest.analysis.level_figures import level_figures
from loadtest.analysis.objectives import Objective, parse_objective
from loadtest.analysis.request_table import RequestTable, build_table
from loadtest.analysis.thresholds import Threshold, judge, parse_threshold
from loadtest.results.run import Run, RunError
from loadtest.results.summary import RunResults


@dataclass(frozen=True, slots=True)
class Analysis:
    """A run's results, and the columns they come from.

    Attributes:
        run: The run.
        tables: The table of each level.
        objectives: The configured objectives.
        results: The figures, findings and verdict.
    """

    run: Run
    tables: tuple[RequestTable, ...]
    objectives: tuple[Objective, ...]
    results: RunResults

    @property
    def duration_s(self) -> float:
        """The time from the start of the run to the end of its last request."""
        return max((record.ended_s for record in self.run.records), default=0.0)


def analyse(run: Run) -> Analysis:
    """Compute the results of a run.

    Raises:
        RunError: The configuration's `slo` or `fail_if` can't be parsed.
    """
    try:
        objectives = configured_objectives(run.configuration)
        thresholds = configured_thresholds(run.configuration)
    except ValueError as error:
        raise RunError(f"{run.path}: the configuration in its summary: {error}") from error
    tables = tuple(build_table(run.records_of(level)) for level in run.levels)
    pairs = zip(run.levels, tables, strict=True)
    levels = tuple(level_figures(level, table, objectives) for level, table in pairs)
    is_unique = run.configuration.get("unique") is True
    max_error_rate = float(run.configuration.get("max_error_rate") or 0.0)
    results = RunResults(
        status=_status(run),
        results=levels,
        findings=(*_ending(run), *find(levels, tables, objectives, is_unique=is_unique)),
        verdict=judge(levels, thresholds, max_error_rate),
    )
    return Analysis(run, tables, objectives, results)


def configured_objectives(configuration: dict[str, Any]) -> tuple[Objective, ...]:
    """Parse `slo`, a list of texts like "ttft:2000"."""
    return tuple(parse_objective(str(text)) for text in configuration.get("slo") or ())


def configured_thresholds(configuration: dict[str, Any]) -> tuple[Threshold, ...]:
    """Parse `fail_if`, a list of expressions."""
    return tuple(parse_threshold(str(text)) for text in configuration.get("fail_if") or ())


def _status(run: Run) -> Literal["finished", "stopped", "interrupted"]:
    if run.header.status in ("running", "interrupted"):
        return "interrupted"
    is_stopped = run.header.status == "stopped" or any(level.was_stopped for level in run.levels)
    return "stopped" if is_stopped else "finished"


def _ending(run: Run) -> list[str]:
    sentences = {
        "stopped": "The run was stopped before its end; the figures cover the time until then.",
        "interrupted": "The tool ended before the run did; the figures cover the time until then.",
    }
    return [sentences[status]] if (status := _status(run)) in sentences else []
