"""Measures what traces cost: the CPU time of a token with traces, as a ratio of that without.

A closed loop of 32 streams asks for answers of 64 tokens from a model of 3 million parameters, so
each second brings about a hundred traces of three spans. Real models answer far fewer requests. All
spans go to a collector in a process of its own, whose CPU time is not counted.

The server runs as `make serve` starts it. It records a trace if its client's `traceparent` asks for
that (`sample_ratio: 0`), so rounds with and without traces run on the same processes, within
seconds: two servers of the same code differ by more than traces cost. Each turn has a round with
traces and two without, in random order. The ratio of those two says how far to trust the other.
What is counted is the CPU time of ingress, replica and HAProxy, the export included. Ray's other
processes have nothing to do with traces, but start and end workers that take seconds.

An unrecorded request has its `traceparent` read all the same. So a request is measured in this
process, too, against an application that has no tracer (`traced_requests`), which is also far
steadier.

Run: python -m benchmarks.tracing
"""

import argparse
import asyncio
import multiprocessing
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.old_checkout import ROOT
from benchmarks.stream_client import closed_loop
from benchmarks.streaming import MODEL, NUM_TOKENS, Prompts, Server, figures, serving
from benchmarks.three_million import save_three_million
from benchmarks.traced_requests import AGAIN, OFF, ON, REQUESTS_PER_STREAM, measured_requests
from tests.otlp_receiver import receiving

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

NUM_STREAMS = 32
SPANS_PER_REQUEST = 3
GOAL = 1.02
"""The most that a token may cost with traces, as a multiple of its cost without."""

Turn = dict[str, float]
"""A figure, by what it was measured with."""

RATIOS = ((ON, OFF), (AGAIN, OFF))


def measured_tokens(
    model: Path, prompts: Prompts, otlp_endpoint: str, num_turns: int, num_requests: int
) -> tuple[list[Turn], list[Turn]]:
    """Start a server, and return the CPU time of a token in us and tokens a second, for each turn.

    Args:
        model: The folder with the model.
        prompts: Makes requests.
        otlp_endpoint: The collector's URL.
        num_turns: How often each is measured.
        num_requests: Requests of one round.
    """
    options = ("--otlp-endpoint", otlp_endpoint, "--sample-ratio", "0")
    cpu_us: list[Turn] = []
    tokens_per_s: list[Turn] = []
    with serving("server", ROOT, model, NUM_STREAMS, *options) as server:
        for _ in range(num_turns + 1):  # the first warms up
            order = random.sample([ON, OFF, AGAIN], 3)
            rounds = {
                name: _measure(server, prompts.requests(num_requests), name) for name in order
            }
            cpu_us.append({name: found[0] for name, found in rounds.items()})
            tokens_per_s.append({name: found[1] for name, found in rounds.items()})
    return cpu_us[1:], tokens_per_s[1:]


def _measure(server: Server, requests: Sequence[bytes], name: str) -> tuple[float, float]:
    """Return the CPU time of a token in us, and tokens a second."""
    traced = [_with_parent(request, is_sampled=name == ON) for request in requests]
    before = _cpu_s(server)
    answers = uvloop.run(closed_loop(server.port, traced, NUM_STREAMS))
    after = _cpu_s(server)
    used_s = sum(after[pid] - before[pid] for pid in before.keys() & after.keys())
    first_s = min(answer.sent_s for answer in answers)
    found = figures(answers, first_s, used_s)
    return found.cpu_us_per_token, found.tokens_per_s


def _with_parent(request: bytes, *, is_sampled: bool) -> bytes:
    parent = f"00-{random.getrandbits(128):032x}-00f067aa0ba902b7-{is_sampled:02x}"
    head, _, body = request.partition(b"\r\n\r\n")
    return b"\r\n".join([head, f"traceparent: {parent}".encode(), b"", body])


def _cpu_s(server: Server) -> dict[int, float]:
    """Return the CPU seconds of the processes that answer requests."""
    found = {}
    for process in server.process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "ServeReplica" in " ".join(process.cmdline()) or process.name() == "haproxy":
                times = process.cpu_times()
                found[process.pid] = times.user + times.system
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
    """Return the 95 % interval of the median, by resampling."""
    dice = random.Random(0)
    medians = [statistics.median(dice.choices(values, k=len(values))) for _ in range(2000)]
    cuts = statistics.quantiles(medians, n=40)
    return cuts[0], cuts[-1]


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
    tokens: list[Turn] = []
    speeds: list[Turn] = []
    with TemporaryDirectory() as folder, collector(SPANS_PER_REQUEST * num_traced) as url:
        model = Path(folder) / MODEL
        prompts = Prompts(save_three_million(model))
        requests = asyncio.run(measured_requests(model, url, NUM_STREAMS, num_here))
        for _ in range(options.starts):
            cpu_us, tokens_per_s = measured_tokens(
                model, prompts, url, options.turns, options.requests
            )
            tokens += cpu_us
            speeds += tokens_per_s
    _report(requests, tokens, speeds)


def _report(requests: Sequence[Turn], tokens: Sequence[Turn], speeds: Sequence[Turn]) -> None:
    table = Table(title=f"{NUM_STREAMS} streams; the server's answers have {NUM_TOKENS} tokens")
    for column in ("figure", "ratio of", "one", "other", "median", "quartiles", "95 % interval"):
        table.add_column(column, justify="right")
    add_rows(table, "this process: CPU us/request", requests)
    add_rows(table, "server: CPU us/token", tokens)
    add_rows(table, "server: tokens/s", speeds)
    Console(width=140).print(table)
    base_us = NUM_TOKENS * statistics.median(turn[OFF] for turn in tokens)
    for one, other in RATIOS:
        more = [turn[one] - turn[other] for turn in requests]
        cells = [f"{each:.0f}" for each in statistics.quantiles(more, n=4)]
        shown = [f"{1 + each / base_us:.4f}" for each in statistics.quantiles(more, n=4)]
        Console(width=140).print(
            f"{one} - {other}: {cells[1]} us a request (quartiles {cells[0]} to {cells[2]}), "
            f"so {shown[1]} ({shown[0]} to {shown[2]}) of the server's CPU time a token"
        )
    ratio = statistics.median(turn[ON] / turn[OFF] for turn in tokens)
    verdict = "within" if ratio <= GOAL else "beyond"
    Console().print(f"CPU time a token on the server: {ratio:.3f}, {verdict} {GOAL}")


if __name__ == "__main__":
    main()
