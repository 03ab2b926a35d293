"""Compares what a replica's start costs with and without what makes it cheaper.

Each start is a fresh process that imports a replica's modules, loads pydoc-chat on the CPU and
warms it up; Ray is imported, but does not run. "plain" starts leave Python's garbage collector on,
compile each kernel, and let torch import its compilers for a trace; "replica" starts are those of
an actor: the collector rests during imports, and kernels and the model's trace are on disk. Both
kinds alternate, and medians of CPU time are compared: user and system time of the process, which
other programs disturb less than a clock. So is the memory that no file backs.

`--sleep` compares a start with a wake from light sleep instead: by the clock, from the process's
beginning and from the wake's to the first token of a short prompt. It also shows the memory that no
file backs, awake and asleep.

Run: python -m benchmarks.starts [--rounds 7] [--sleep [--source FOLDER]]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.pairs import compared

if TYPE_CHECKING:
    from deployments.engine.engine import Engine
    from deployments.generator.placed_engine import PlacedEngine

MODEL: Final = Path(__file__).parents[1] / "models" / "pydoc-chat"
PHASES: Final = ("imports", "weights", "warm-up")
MEMORY: Final = "memory, MiB"
KINDS: Final = ("plain", "replica")
WAKES: Final = 3
"""Wakes of a process, whose median counts."""

Phases = dict[str, float]
"""CPU seconds by phase, and MiB after the last one as `MEMORY`."""


def start(source: Path, *, as_actor: bool) -> tuple["PlacedEngine", Phases]:
    """Start in this process as a replica does, and return what each phase took.

    Args:
        source: The model's folder.
        as_actor: Whether to import, and to trace, as an actor of Ray does.
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
    from deployments.device.memory_readers import unshared_bytes
    from deployments.generator.placed_engine import place_engine
    from deployments.replica.assigned_device import open_assigned_device

    entry = ModelConfig(id=source.name, source=str(source), device="cpu", light_sleep_after_s=3600)
    spec = ModelSpec(entry, entry.source, 0)
    tracer = "deployments.compute.traced_model.graph_tracer.locating_cheaply"
    with nullcontext() if as_actor else patch(tracer, nullcontext):
        placed = place_engine(spec, open_assigned_device(spec), end_phase)
    seconds[MEMORY] = unshared_bytes() / 2**20
    return placed, seconds


def sleep_and_wake(source: Path) -> Phases:
    """Start in this process, sleep and wake; return seconds by the clock, and MiB by state."""
    placed, _ = start(source, as_actor=True)
    from deployments.device.memory_readers import unshared_bytes

    engine = placed.engine
    _run_to_first_token(engine)
    start_s = time.time() - psutil.Process().create_time()
    found = {"start": start_s, "awake": unshared_bytes() / 2**20}
    waking = []
    for _ in range(WAKES):
        engine.sleep()
        found["asleep"] = unshared_bytes() / 2**20
        began_s = time.monotonic()
        engine.wake()
        _run_to_first_token(engine)
        waking.append(time.monotonic() - began_s)
    return found | {"wake": median(waking)}


def _run_to_first_token(engine: "Engine") -> None:
    from deployments.contract.sampling_params import SamplingParams
    from deployments.engine.scheduling.sequence import SequenceRequest

    engine.add(SequenceRequest("r", tuple(range(2, 34)), SamplingParams(max_tokens=1)))
    while engine.has_work:
        engine.step()


def measure(kind: str, folder: Path, source: Path = MODEL) -> Phases:
    """Return what a start in a new process found; see `start` and `sleep_and_wake`.

    Args:
        kind: One of `KINDS`, or "sleep".
        folder: Where kernels and traces lie; a plain start has an empty one.
        source: The model's folder.
    """
    with TemporaryDirectory() as empty:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.starts"),
                *("--start", kind, "--source", str(source)),
            ],
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
    for phase in (*PHASES, "all", MEMORY):
        pairs = [(_of(plain, phase), _of(replica, phase)) for plain, replica in rounds]
        table.add_row(phase, *(f"{figure:.2f}" for figure in compared(pairs)))
    return table


def _of(phases: Phases, phase: str) -> float:
    return sum(phases[each] for each in PHASES) if phase == "all" else phases[phase]


def sleep_table_of(rounds: list[Phases]) -> Table:
    """Return the medians of starts and wakes, and of the memory in both states."""
    table = Table(title=f"A start and a wake from light sleep, medians of {len(rounds)} processes")
    for column in ("", "from the start", "from light sleep", "ratio"):
        table.add_column(column, justify="right")
    times = compared([(each["start"], each["wake"]) for each in rounds])
    table.add_row("seconds to the first token", *(f"{figure:.2f}" for figure in times))
    memory = compared([(each["awake"], each["asleep"]) for each in rounds])
    table.add_row("MiB, awake and asleep", *(f"{figure:.2f}" for figure in memory))
    return table


def main() -> None:
    """Alternate, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of starts")
    parser.add_argument("--sleep", action="store_true", help="compare starts with wakes")
    parser.add_argument("--source", type=Path, default=MODEL, help="the model's folder")
    parser.add_argument("--start", choices=(*KINDS, "sleep"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start == "sleep":
        print(json.dumps(sleep_and_wake(given.source)))  # noqa: T201 - for the parent
        return
    if given.start:
        _, phases = start(given.source, as_actor=given.start == "replica")
        print(json.dumps(phases))  # noqa: T201 - for the parent
        return
    with TemporaryDirectory() as name:
        folder, source = Path(name), given.source.resolve()
        measure("sleep" if given.sleep else "replica", folder, source)  # compiles and traces
        if given.sleep:
            slept = [measure("sleep", folder, source) for _ in range(given.rounds)]
            Console().print(sleep_table_of(slept))
            return
        rounds = [
            (measure("plain", folder, source), measure("replica", folder, source))
            for _ in range(given.rounds)
        ]
    Console().print(table_of(rounds))


if __name__ == "__main__":
    main()
