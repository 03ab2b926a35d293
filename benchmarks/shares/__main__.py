"""Measures fair shares and priorities: tokens by key over time, and the time to a first token.

It serves a random model with keys, as `make serve` does, and measures

- two keys of weights 1 and 3, each with more clients than its model's replicas run at once, behind
  one ingress with one replica, and behind two ingresses with two;
- a key with one client, by itself and beside a key with 50;
- long streams of low priority that fill two replicas, while requests of a better one come at a
  steady rate: their time to a first token beside that of an idle server, whether the long texts
  are the same, and tokens a second beside those of the long streams by themselves;
- a batch by itself: its tokens a second beside those of the engine alone, with as many sequences at
  once; and requests that come at a steady rate beside a batch.

No two runs that are timed have a prompt in common, so none finds its prompts in the prefix cache.

Run: python -m benchmarks.shares [--seconds 60] [--cases NAMES] [--shape NAME] [--chat-rate 5]
[--max-stall-ms 200] [--out FOLDER], with `weights`, `crowd`, `batch` and `priorities`, or some.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from benchmarks.cpu_shapes import SHAPES, THREE_MILLION, save_shape
from benchmarks.serving.rounds import words_of
from benchmarks.shares.batch import engine_speed_of
from benchmarks.shares.cases import (
    ClientOf,
    measure_batch,
    measure_crowd,
    measure_priorities,
    measure_weights,
    warm_up,
)
from benchmarks.shares.client import Client
from benchmarks.shares.report import Report
from benchmarks.shares.server import MODEL, serving

Measure = Callable[[ClientOf, float, Report], None]
"""Measures a case for some seconds."""


def main() -> None:
    """Measure, print the table, and draw the plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60, help="of each measurement")
    parser.add_argument("--cases", default="weights,crowd,batch,priorities")
    parser.add_argument("--shape", choices=SHAPES, default=THREE_MILLION, help="of the model")
    parser.add_argument(
        "--chat-rate",
        type=float,
        default=5,
        help="requests a second beside a batch or long streams",
    )
    parser.add_argument("--max-stall-ms", type=int, help="of the model's entry")
    parser.add_argument(
        "--out", type=Path, default=Path("build"), help="the folder of the plots and logs"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report = measured(options)
    Console().print(report.table())
    report.figure().savefig(options.out / "shares.svg", format="svg")
    if not all(report.are_met):
        sys.exit("a bar is missed")


def measured(options: argparse.Namespace) -> Report:
    """Measure the cases; the servers' logs go to a folder."""
    cases, seconds, out = {*options.cases.split(",")}, options.seconds, options.out
    report = Report()
    with TemporaryDirectory() as name:
        folder = Path(name)
        words = words_of(save_shape(options.shape, folder / MODEL))
        rate = options.chat_rate
        speed_of = partial(engine_speed_of, folder / MODEL)
        batch = partial(measure_batch, chat_rate=rate, engine_speed_of=speed_of)
        priorities = partial(measure_priorities, chat_rate=rate)
        servers: tuple[tuple[int, str, dict[str, Measure]], ...] = (
            (1, "one ingress", {"crowd": measure_crowd, "batch": batch}),
            (2, "two ingresses", {"priorities": priorities}),
        )
        for number, ingresses, measures in servers:
            if not {"weights", *measures} & cases:
                continue
            with serving(folder, out, number, number, options.max_stall_ms) as port:
                client_of = partial(Client, port, words)
                warm_up(client_of)
                if "weights" in cases:
                    measure_weights(client_of, seconds, ingresses, report)
                for case, measure in measures.items():
                    if case in cases:
                        measure(client_of, seconds, report)
    return report


if __name__ == "__main__":
    main()
