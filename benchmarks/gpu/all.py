"""Measures all that the engine does on a GPU, in nine minutes: one command, one folder.

Run: python -m benchmarks.gpu.all OUT

Each part runs in a process of its own and is ended after its own seconds, so that no part takes
another's time, memory or CUDA context. These processes are forked from one that has imported all
packages and never touches the device, since importing takes ten seconds on some machines.

`OUT/results.jsonl` has a line for each part, and `OUT/table.md` a table for each; `OUT/PART.log`
has what the part printed. A part that fails or is ended keeps the rows that it had. What was
measured is on disk as soon as a row is.

`--device cpu` runs the same on tiny shapes, to check that it runs.
"""

import argparse
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import parts
from benchmarks.gpu.parts import PARTS

MINUTES = 9.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A part that has ended.

    Attributes:
        name: The part's name.
        seconds: How long it ran.
        rows: Its rows, in order; each is a table's line, by columns.
        trouble: Why it is incomplete; None if it is not.
    """

    name: str
    seconds: float
    rows: tuple[dict[str, Any], ...]
    trouble: str | None

    @property
    def line(self) -> str:
        """The part as a line of JSON."""
        fields = {"part": self.name, "seconds": round(self.seconds, 1), "rows": self.rows}
        return json.dumps({**fields, "trouble": self.trouble})

    @property
    def markdown(self) -> str:
        """The part as a table."""
        lines = [f"## {self.name}", ""]
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        if columns:
            cells = [columns, ["---"] * len(columns)]
            cells += [[str(row.get(column, "-")) for column in columns] for row in self.rows]
            lines += [f"| {' | '.join(row)} |" for row in cells]
            lines.append("")
        ended = f", {self.trouble}" if self.trouble else ""
        return "\n".join([*lines, f"{self.seconds:.0f} s{ended}", ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts, and write the table after each."""
    args = _parse(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    end, outcomes = time.monotonic() + 60 * args.minutes, list[Outcome]()
    for name in args.parts.split(","):
        left_s = end - time.monotonic()
        limit_s = min(PARTS[name].limit_s, left_s)
        if limit_s <= 0:
            outcome = Outcome(name, 0.0, (), "no time was left")
        else:
            outcome = run_part(name, args.device, args.out, limit_s)
        outcomes.append(outcome)
        _write(args.out, outcomes)
        print(outcome.markdown, flush=True)  # noqa: T201 # the program's output


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="the folder to write to")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS), help="a list of parts, in order")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together")
    return parser.parse_args(arguments)


def run_part(name: str, device: str, out: Path, limit_s: float) -> Outcome:
    """Run a part in a process of its own, for at most `limit_s` seconds.

    Args:
        name: The part.
        device: cuda or cpu.
        out: The folder for its rows and its log.
        limit_s: Its time.
    """
    rows_file, log_file = out / f"{name}.jsonl", out / f"{name}.log"
    rows_file.unlink(missing_ok=True)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([parts.__name__])
    started, trouble = time.monotonic(), None
    process = server.Process(target=_run, args=(name, device, rows_file, log_file))
    process.start()
    assert process.pid is not None
    try:
        process.join(limit_s)
        if process.exitcode is None:
            trouble = f"ended after {limit_s:.0f} s"
        elif process.exitcode:
            trouble = f"exit status {process.exitcode}; see {name}.log"
    finally:
        # What the part has started goes with it: it would hold the GPU's memory.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # it may not lead its group yet
        process.join()
    return Outcome(name, time.monotonic() - started, _rows(rows_file), trouble)


def _run(name: str, device: str, rows_file: Path, log_file: Path) -> None:
    """Run a part in this process, which leads a group of its own; all that it prints is logged."""
    os.setsid()
    with log_file.open("w", encoding="utf-8") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    parts.main(name, device, str(rows_file))


def _rows(file: Path) -> tuple[dict[str, Any], ...]:
    """Return a part's rows, without one that its end has cut."""
    if not file.exists():
        return ()
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return tuple(json.loads(line) for line in lines if line.endswith("\n"))


def _write(out: Path, outcomes: Sequence[Outcome]) -> None:
    lines = "".join(f"{outcome.line}\n" for outcome in outcomes)
    (out / "results.jsonl").write_text(lines, encoding="utf-8")
    tables = "\n".join(outcome.markdown for outcome in outcomes)
    (out / "table.md").write_text(tables, encoding="utf-8")


if __name__ == "__main__":
    main()
