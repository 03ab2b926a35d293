"""Measures what traces cost: the CPU time of a token with traces, as a ratio of that without.

A closed loop of 32 streams asks for answers of 64 tokens from a model of 3 million parameters, so
each second brings about a hundred traces of three spans. Real models answer far fewer requests. All
spans go to a collector in a process of its own, whose CPU time is not counted.

The server runs as `make serve` starts it. It records a trace if its client's `traceparent` asks for
that (`sample_ratio: 0`), so rounds with and without traces run on the same processes, within
seconds: two servers of the same code differ by more than traces cost. Each turn has a round with
traces and two without, in random order. The ratio of those two says how far to trust the other.
What is counted is the CPU time of ingress, replica and HAProxy, the export included. Ray's other
processes have nothing to do with traces, but start and end workers that take seconds. The engine's
thread, the busiest of the replica, has the same work with and without traces and varies most. So a
second figure has the median of its time in all rounds.

An unrecorded request has its `traceparent` read all the same. So a request is measured in this
process, too, against an application that has no tracer (`traced_requests`), which is also far
steadier.

Run: python -m benchmarks.tracing
"""

import argparse
import asyncio
import math
import multiprocessing
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.old_checkout import ROOT
from benchmarks.stream_client import closed_loop
from benchmarks.streaming import MODEL, NUM_TOKENS, Prompts, Server, figures, serving
from benchmarks.three_million import save_three_million
from benchmarks.traced_requests import AGAIN, OFF, ON, REQUESTS_PER_STREAM, measured_requests
from loadtest.analysis.bootstrap import interval, percentile_draws
from tests.otlp_receiver import receiving

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

NUM_STREAMS = 32
SPANS_PER_REQUEST = 3
CONSOLE = Console(width=140)
GOAL = 1.03
"""The most that a token may cost with traces, as a multiple of its cost without."""

Turn = dict[str, float]
"""A figure, by what it was measured with."""

RATIOS = ((ON, OFF), (AGAIN, OFF))


@dataclass(frozen=True, slots=True)
class Round:
    """CPU time of a token in us: of the engine's thread, and of all other threads."""

    engine_us: float
    others_us: float
    tokens_per_s: float


def measured_rounds(
    model: Path, prompts: Prompts, otlp_endpoint: str, num_turns: int, num_requests: int
) -> list[dict[str, Round]]:
    """Start a server, and return each turn's rounds.

    Args:
        model: The folder with the model.
        prompts: Makes requests.
        otlp_endpoint: The collector's URL.
        num_turns: How often each is measured.
        num_requests: Requests of one round.
    """
    options = ("--otlp-endpoint", otlp_endpoint, "--sample-ratio", "0")
    with serving("server", ROOT, model, NUM_STREAMS, *options) as server:
        turns = [
            {
                name: _measure(server, prompts.requests(num_requests), name)
                for name in random.sample([ON, OFF, AGAIN], 3)
            }
            for _ in range(num_turns + 1)  # the first warms up
        ]
    return turns[1:]


def _measure(server: Server, requests: Sequence[bytes], name: str) -> Round:
    traced = [_with_parent(request, is_sampled=name == ON) for request in requests]
    before = _cpu_s(server)
    answers = uvloop.run(closed_loop(server.port, traced, NUM_STREAMS))
    after = _cpu_s(server)
    used = {thread: after[thread] - before[thread] for thread in before.keys() & after.keys()}
    engine_s = max(used_s for (is_replica, _), used_s in used.items() if is_replica)
    found = figures(answers, min(answer.sent_s for answer in answers), sum(used.values()))
    engine_us = found.cpu_us_per_token * engine_s / sum(used.values())
    return Round(engine_us, found.cpu_us_per_token - engine_us, found.tokens_per_s)


def _with_parent(request: bytes, *, is_sampled: bool) -> bytes:
    parent = f"00-{random.getrandbits(128):032x}-00f067aa0ba902b7-{is_sampled:02x}"
    head, _, body = request.partition(b"\r\n\r\n")
    return b"\r\n".join([head, f"traceparent: {parent}".encode(), b"", body])


def _cpu_s(server: Server) -> dict[tuple[bool, str], float]:
    """Return the CPU seconds of each thread that answers, and whether it is a replica's."""
    found = {}
    for process in server.process.children(recursive=True):
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            title = " ".join(process.cmdline())
            if "ServeReplica" in title or process.name() == "haproxy":
                is_replica = MODEL in title
                for thread in Path(f"/proc/{process.pid}/task").iterdir():
                    nanoseconds = (thread / "schedstat").read_text().split()[0]
                    found[is_replica, thread.name] = int(nanoseconds) / 1e9
    return found


@contextmanager
def collector(num_spans: int) -> Iterator[str]:
    """Receive spans in a process of its own until the block ends; yield its URL.

    Raises:
        RuntimeError: Fewer spans came than are given.
    """
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    spawning.Process(target=_collect, args=(there,), daemon=True).start()
    yield here.recv()
    here.send(None)
    if (num_received := here.recv()) < num_spans:
        raise RuntimeError(f"{num_received} spans came, and not {num_spans}")


def _collect(pipe: "Connection[Any, Any]") -> None:
    with receiving() as receiver:
        pipe.send(receiver.url)
        pipe.recv()
        pipe.send(len(receiver.spans))


def add_rows(table: Table, what: str, turns: Sequence[Turn]) -> None:
    """Add the medians of all rounds, and the median and the quartiles of the turns' ratios."""
    for one, other in RATIOS:
        ratios = [turn[one] / turn[other] for turn in turns]
        low, median, high = statistics.quantiles(ratios, n=4)
        medians = (statistics.median(turn[name] for turn in turns) for name in (one, other))
        table.add_row(
            what,
            f"{one} / {other}",
            *(f"{each:.1f}" for each in medians),
            f"{median:.3f}",
            f"{low:.3f} to {high:.3f}",
            "{:.3f} to {:.3f}".format(*_interval(ratios)),
            end_section=(one, other) == RATIOS[-1],
        )


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median; not numbers if there are fewer than four values."""
    found = interval(percentile_draws(np.array(values), 50, np.random.default_rng(0)))
    return (math.nan, math.nan) if found is None else (found.low, found.high)


def main() -> None:
    """Measure, and print the figures and whether the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--starts", type=int, default=2, help="of the server")
    parser.add_argument("--turns", type=int, default=20, help="after each start")
    parser.add_argument("--requests", type=int, default=128, help="in one round of the server")
    options = parser.parse_args()
    num_here = 4 * options.turns
    num_traced = options.starts * (options.turns + 1) * options.requests
    num_traced += (num_here + 1) * REQUESTS_PER_STREAM * NUM_STREAMS
    rounds: list[dict[str, Round]] = []
    with TemporaryDirectory() as folder, collector(SPANS_PER_REQUEST * num_traced) as url:
        model = Path(folder) / MODEL
        prompts = Prompts(save_three_million(model))
        requests = asyncio.run(measured_requests(model, url, NUM_STREAMS, num_here))
        _report_requests(requests)
        for _ in range(options.starts):
            rounds += measured_rounds(model, prompts, url, options.turns, options.requests)
            _report_rounds(rounds, requests)


def _table() -> Table:
    table = Table(title=f"{NUM_STREAMS} streams; the server's answers have {NUM_TOKENS} tokens")
    for column in ("figure", "ratio of", "one", "other", "median", "quartiles", "95 % interval"):
        table.add_column(column, justify="right")
    return table


def _report_requests(requests: Sequence[Turn], base_us: float | None = None) -> None:
    """Print what traces add to a request, and to one of the server that takes `base_us`."""
    table = _table()
    add_rows(table, "this process: CPU us/request", requests)
    CONSOLE.print(table)
    for one, other in RATIOS:
        more_us = [turn[one] - turn[other] for turn in requests]
        cuts = [*statistics.quantiles(more_us, n=4), *_interval(more_us)]
        low, middle, high, first, last = (
            f"{each:.0f} us" + ("" if base_us is None else f" ({each / base_us:+.2%})")
            for each in cuts
        )
        CONSOLE.print(
            f"{one} - {other}: {middle} a request, quartiles {low} to {high}, "
            f"95 % interval {first} to {last}"
        )


def _report_rounds(rounds: Sequence[dict[str, Round]], requests: Sequence[Turn]) -> None:
    """Print the server's figures so far, what a request's traces are of them, and the verdict."""
    engine_us = statistics.median(each.engine_us for turn in rounds for each in turn.values())
    steady = _figure(rounds, lambda each: engine_us + each.others_us)
    table = _table()
    add_rows(
        table,
        "server: CPU us/token",
        _figure(rounds, lambda each: each.engine_us + each.others_us),
    )
    add_rows(table, f"the engine's part at {engine_us:.0f}", steady)
    add_rows(table, "server: tokens/s", _figure(rounds, lambda each: each.tokens_per_s))
    CONSOLE.print(table)
    _report_requests(requests, NUM_TOKENS * statistics.median(turn[OFF] for turn in steady))
    ratio = statistics.median(turn[ON] / turn[OFF] for turn in steady)
    verdict = "within" if ratio <= GOAL else "beyond"
    CONSOLE.print(f"CPU time a token on the server: {ratio:.3f}, {verdict} {GOAL}")


def _figure(rounds: Sequence[dict[str, Round]], value: Callable[[Round], float]) -> list[Turn]:
    return [{name: value(each) for name, each in turn.items()} for turn in rounds]


if __name__ == "__main__":
    main()
