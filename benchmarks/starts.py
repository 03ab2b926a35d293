"""Compares what a replica's start costs with and without what makes it cheaper.

Each start is a fresh process that imports a replica's modules, loads pydoc-chat on the CPU and
warms it up; Ray is imported, but does not run. "plain" starts leave Python's garbage collector on
and compile each kernel; "replica" starts are those of an actor: the collector rests during imports,
and the kernels are on disk. Both kinds alternate, and medians of CPU time are compared: user and
system time of the process, which other programs disturb less than a clock.

Run: python -m benchmarks.starts [--rounds 7]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from benchmarks.pairs import compared

MODEL: Final = Path(__file__).parents[1] / "models" / "pydoc-chat"
PHASES: Final = ("imports", "weights", "warm-up")
KINDS: Final = ("plain", "replica")

Phases = dict[str, float]
"""CPU seconds by phase."""


def start(*, as_actor: bool) -> Phases:
    """Start in this process as a replica does, and return what each phase took.

    Args:
        as_actor: Whether to import as an actor of Ray does.
    """
    from deployments.replica import own_actor

    seconds: Phases = {}
    last_s = 0.0

    def end_phase(name: str) -> None:
        nonlocal last_s
        now_s = time.process_time()
        seconds[name], last_s = now_s - last_s, now_s

    with patch.object(own_actor, "is_actor", lambda: as_actor):
        import deployments.text_generator  # noqa: F401 - what Ray imports for a replica
    end_phase("imports")
    from deployments.contract.model_spec import ModelConfig, ModelSpec
    from deployments.generator.placed_engine import place_engine
    from deployments.replica.assigned_device import open_assigned_device

    entry = ModelConfig(id=MODEL.name, source=str(MODEL), device="cpu")
    spec = ModelSpec(entry, entry.source, 0)
    place_engine(spec, open_assigned_device(spec), end_phase)
    return seconds


def measure(kind: str, folder: Path) -> Phases:
    """Return what each phase of a start in a new process took.

    Args:
        kind: One of `KINDS`.
        folder: Where compiled kernels lie; a plain start has an empty one.
    """
    with TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.starts", "--start", kind],
            env={**os.environ, "XDG_CACHE_HOME": empty if kind == "plain" else str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    phases: Phases = json.loads(done.stdout.splitlines()[-1])
    return phases


def table_of(rounds: list[tuple[Phases, Phases]]) -> Table:
    """Return the medians of both kinds, and of the pairs' quotients."""
    table = Table(title=f"CPU seconds of a start, medians of {len(rounds)} pairs")
    for column in ("phase", *KINDS, "plain / replica"):
        table.add_column(column, justify="right")
    for phase in (*PHASES, "all"):
        pairs = [(_of(plain, phase), _of(replica, phase)) for plain, replica in rounds]
        table.add_row(phase, *(f"{figure:.2f}" for figure in compared(pairs)))
    return table


def _of(phases: Phases, phase: str) -> float:
    return sum(phases.values()) if phase == "all" else phases[phase]


def main() -> None:
    """Alternate, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of starts")
    parser.add_argument("--start", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start:
        print(json.dumps(start(as_actor=given.start == "replica")))  # noqa: T201 - for the parent
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        measure("replica", folder)  # compiles the kernels
        rounds = [
            (measure("plain", folder), measure("replica", folder)) for _ in range(given.rounds)
        ]
    Console().print(table_of(rounds))


if __name__ == "__main__":
    main()
