"""Levels' figures of a made run, as `analyse` computes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.analysis.run_results import analyse
from loadtest.run import read_run
from loadtest.summary import RunResults
from tests.loadtest.made_runs import write_run


def results_of(
    directory: Path, levels: Sequence[Any], status: str = "finished", **configuration: Any
) -> RunResults:
    """Write a run and analyse it."""
    return analyse(read_run(write_run(directory / "run", levels, configuration, status))).results
