"""The results of a made run, as `analyse` computes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.analysis.run_results import analyse
from loadtest.results.run import read_run
from loadtest.results.summary import RunResults
from tests.loadtest.made_runs import write_run


def results_of(
    directory: Path, levels: Sequence[Any], status: str = "finished", **configuration: Any
) -> RunResults:
    """Write a run, analyse it, and return its results."""
    return analyse(read_run(write_run(directory / "run", levels, configuration, status))).results
