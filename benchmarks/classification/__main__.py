"""Classification, compared with a hand-made queue batcher and with `@serve.batch`.

(a) offline: batch sizes 1 to 128 on texts of 100 to 300 and of 100 to 800 characters, in ms a text.
(b) online: the queue batcher with nine settings, one call per piece, `@serve.batch` around the
    device, and this project, under 1 to 100 users.
(c) open loop: 120, 240 and 480 requests/s on a device of known speed.
(d) RoBERTa-base's shape over HTTP with 32 users, compared with (a)'s optimum and the queue batcher.
(e) (b)'s model without a server: how long short texts wait for one of 5,000 characters.

Models with random weights are made at the start. Everything is seeded and runs locally. Each part
writes a CSV file, and (b) writes its plots as SVG.

Run: python -m benchmarks.classification [--quick] [--parts a,b,c,d,e] [--out FOLDER]
"""

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from benchmarks.classification import long_and_short, offline, online, open_loop, over_http
from benchmarks.classification.designs import (
    ALL,
    CHOSEN_QUEUE_BATCHER,
    PIECES,
    RAYSTREAM,
    SERVE_BATCH,
    Design,
)
from benchmarks.classification.online import Window
from benchmarks.classification.shapes import ROBERTA_BASE, SMALL, TINY, build
from benchmarks.classification.table import Figures

PARTS = "a,b,c,d,e"
ONLINE = Window(warm_up_s=1.5, window_s=4)
OVER_HTTP = Window(warm_up_s=5, window_s=20)


@dataclass(frozen=True, slots=True)
class Plan:
    """The extent of a run of the benchmark."""

    batch_sizes: Sequence[int] = offline.BATCH_SIZES
    num_texts: int = 128
    rounds: int = 1
    designs: Sequence[Design] = ALL
    users: Sequence[int] = (1, 5, 10, 20, 50, 100)
    online: Window = ONLINE
    open_loop_s: float = 4
    num_http_users: int = 32
    over_http: Window = OVER_HTTP
    http_rounds: int = 2
    fair_users: Sequence[int] = (8, 16, 32)
    fair_rounds: int = 7


QUICK = Plan(
    batch_sizes=(1, 8, 32),
    num_texts=32,
    designs=(CHOSEN_QUEUE_BATCHER, PIECES, SERVE_BATCH, RAYSTREAM),
    users=(1, 20),
    online=Window(0.5, 2),
    open_loop_s=4,
    over_http=Window(3, 8),
    http_rounds=1,
    fair_users=(16,),
    fair_rounds=3,
)


class Benchmark:
    """Runs the parts and writes their results."""

    def __init__(self, plan: Plan, out: Path, work: Path, model: str | None) -> None:
        """Prepare to measure.

        Args:
            plan: The extent of the run.
            out: The folder of CSV files, plots and the servers' logs.
            work: The folder of the models that are made.
            model: A model's folder for (a) and (d); None makes a model.
        """
        self._plan = plan
        self._out = out
        self._work = work
        self._console = Console()
        self._base = model
        self._optimum: offline.Optimum | None = None

    def offline(self) -> None:
        """Run (a)."""
        plan, model = self._plan, self._base_model()
        swept = offline.sweep(
            model, Path(model).name, plan.batch_sizes, plan.num_texts, plan.rounds
        )
        self._optimum = swept.optimum
        self._show(swept.figures)

    def online(self) -> None:
        """Run (b)."""
        plan, model = self._plan, str(build(SMALL, self._work))
        with online.servers(model, self._out) as addresses:
            measured = asyncio.run(online.measure(addresses, plan.designs, plan.users, plan.online))
        self._show(online.figures(measured, SMALL.name, plan.online))
        for name, chart in online.charts(measured).items():
            chart.save(self._out / f"{name}.svg")

    def open_loop(self) -> None:
        """Run (c)."""
        model = str(build(TINY, self._work))
        self._show(asyncio.run(open_loop.measure(model, self._plan.open_loop_s)))

    def over_http(self) -> None:
        """Run (d), and (a) before it if that has not run."""
        if self._optimum is None:
            self.offline()
        assert self._optimum is not None
        plan = self._plan
        self._show(
            over_http.measure(
                self._base_model(),
                self._out,
                plan.num_http_users,
                plan.over_http,
                plan.http_rounds,
                self._optimum,
            )
        )

    def long_and_short(self) -> None:
        """Run (e)."""
        plan, model = self._plan, str(build(SMALL, self._work))
        self._show(long_and_short.measure(model, plan.fair_users, plan.fair_rounds))

    def _base_model(self) -> str:
        if self._base is None:
            self._base = str(build(ROBERTA_BASE, self._work))
        return self._base

    def _show(self, figures: Figures) -> None:
        self._console.print(figures.table)
        self._console.print(f"written: {figures.write_csv(self._out)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write CSV files and plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="take about three minutes")
    parser.add_argument("--out", type=Path, default=Path("runs/classification"))
    parser.add_argument("--parts", default=PARTS, help=f"the parts to run, of {PARTS}")
    parser.add_argument("--model", help="a classifier's folder for (a) and (d)")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    # Without this, a surrounding `timeout` would leave the servers running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    disable_progress_bar()  # type: ignore[no-untyped-call] # transformers leaves it untyped
    with tempfile.TemporaryDirectory(prefix="classification-") as work:
        plan = QUICK if args.quick else Plan()
        benchmark = Benchmark(plan, args.out, Path(work), args.model)
        parts = {
            "a": benchmark.offline,
            "b": benchmark.online,
            "c": benchmark.open_loop,
            "d": benchmark.over_http,
            "e": benchmark.long_and_short,
        }
        for part in args.parts.split(","):
            if part not in parts:
                parser.error(f"there is no part {part!r}; the parts are {PARTS}")
            parts[part]()


if __name__ == "__main__":
    main()
