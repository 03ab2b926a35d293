"""Measures models that take turns on a device: swaps, waits, and whether texts stay the same.

Three random models of 3 million parameters are served as `make serve` serves a file, with room for
one. Clients each ask one after the other, in the order A, B, A, A, C, as soon as their last answer
has ended; then all that was asked is answered. The least possible loads are those of an order that
knows all requests, and lets none wait for its model longer than the longest wait that was measured
(`foresight`). Times are those at which tokens came to the clients: a swap takes from the last token
of one model to the first one of the next.

With `--light` the same is measured once more, with models that keep their processes and sleep
lightly between their turns, and the ratio of the swaps' medians is printed.

Run: python -m benchmarks.turns [--seconds 180] [--clients 30] [--min-turn 30] [--light]
[--out FOLDER]
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop
from rich.console import Console

from benchmarks.turns.client import Clients
from benchmarks.turns.report import Report
from benchmarks.turns.server import serving
from deployments.turns import MIN_TURN_S

MODELS = ("model-a", "model-b", "model-c")


def main() -> None:
    """Measure, print the table, and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=180, help="in which clients ask")
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--min-turn", type=float, default=MIN_TURN_S, help="`min_turn_s`")
    parser.add_argument(
        "--light", action="store_true", help="measure models that sleep lightly beside the others"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build"), help="the folder of the plots and the logs"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    reports = []
    for is_light in (False, True) if options.light else (False,):
        report = measured(
            options.seconds, options.clients, options.min_turn, options.out, is_light=is_light
        )
        name = name_of(is_light=is_light)
        console.print(report.table(name))
        report.figure().savefig(options.out / f"{name}.svg", format="svg")
        reports.append(report)
    if options.light:
        heavy_s, light_s = (each.median_swap_s for each in reports)
        console.print(
            f"A swap to a new process takes {heavy_s:.2f} s, and a light one {light_s:.2f} s "
            f"(medians): {heavy_s / light_s:.1f} : 1"
        )
    if not all(row.is_met for report in reports for row in report.rows):
        sys.exit("a bar is missed")


def name_of(*, is_light: bool) -> str:
    """Return the name of a run and of its files."""
    return "light-turns" if is_light else "turns"


def measured(
    seconds: float, num_clients: int, min_turn_s: float, out: Path, *, is_light: bool = False
) -> Report:
    """Measure; the server's log goes to a folder."""
    log = out / f"{name_of(is_light=is_light)}.log"
    with (
        TemporaryDirectory() as name,
        serving(Path(name), log, MODELS, min_turn_s, is_light=is_light) as port,
    ):
        alone, clients = Clients(port), Clients(port)
        uvloop.run(alone.ask_alone(MODELS))
        uvloop.run(clients.ask_for(seconds, num_clients, MODELS))
    assert all(each.is_whole for each in alone.answers), "undisturbed answers are whole"
    return Report(clients.answers, {each.question: each.text for each in alone.answers})


if __name__ == "__main__":
    main()
