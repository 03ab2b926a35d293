"""Compares the cost of streams with traces and without, on a model of 3 million parameters.

Both servers run this checkout as `make serve` does; one sends a trace of every request to a
collector in this process, which keeps what it gets. A closed loop of 32 streams asks for answers of
64 tokens, so each second brings about a hundred traces of three spans. Real models answer far fewer
requests. Rounds alternate and are compared in pairs, since machines are noisy. Two servers of the
same code differ, too, so both are started anew several times.

CPU time is that of all the server's processes, the export included, and is the steadiest figure.

Run: python -m benchmarks.tracing
"""

import argparse
import random
import statistics
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from benchmarks.old_checkout import ROOT
from benchmarks.pairs import compared
from benchmarks.streaming import FIGURES, MODEL, Prompts, Round, measure, serving
from benchmarks.three_million import save_three_million
from tests.otlp_receiver import receiving

NUM_STREAMS = 32
SPANS_PER_REQUEST = 3
GOAL = 1.02
"""The most that a token may cost with traces, as a multiple of its cost without."""

Pair = tuple[Round, Round]


def measured_pairs(model: Path, prompts: Prompts, num_rounds: int, num_requests: int) -> list[Pair]:
    """Start both servers, and return pairs of rounds: with traces, and without.

    Raises:
        RuntimeError: Spans are missing.
    """
    with ExitStack() as stack:
        receiver = stack.enter_context(receiving())
        options = ("--otlp-endpoint", receiver.url)
        on = stack.enter_context(serving("on", ROOT, model, NUM_STREAMS, *options))
        off = stack.enter_context(serving("off", ROOT, model, NUM_STREAMS))
        pairs = []
        for turn in range(num_rounds + 1):  # the first warms both up
            rounds = {
                server: measure(server, prompts.requests(num_requests), NUM_STREAMS)
                for server in ((on, off) if turn % 2 else (off, on))
            }
            pairs.append((rounds[on], rounds[off]))
            ratio = rounds[on].cpu_us_per_token / rounds[off].cpu_us_per_token
            Console().print(f"pair {turn}: {ratio:.3f} of the CPU time a token")
        num_spans = SPANS_PER_REQUEST * num_requests * (num_rounds + 1)
        receiver.wait_for(lambda spans: len(spans) >= num_spans)
    return pairs[1:]


def table_of(pairs: list[Pair]) -> Table:
    """Return the medians of all rounds, the pairs' median ratio and its 95 % interval."""
    table = Table(title=f"{NUM_STREAMS} streams, {len(pairs)} pairs of rounds")
    for column in ("figure", "with traces", "without", "ratio", "95 % interval"):
        table.add_column(column, justify="right")
    for figure, value in FIGURES.items():
        values = [(value(on), value(off)) for on, off in pairs]
        on, off, ratio = compared(values)
        low, high = _interval(values)
        cells = (f"{on:.1f}", f"{off:.1f}", f"{ratio:.3f}", f"{low:.3f} to {high:.3f}")
        table.add_row(figure, *cells)
    return table


def _interval(values: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the 95 % interval of the median ratio, by resampling the pairs."""
    ratios = [on / off for on, off in values]
    dice = random.Random(0)
    medians = [statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(2000)]
    cuts = statistics.quantiles(medians, n=40)
    return cuts[0], cuts[-1]


def main() -> None:
    """Compare, and print the figures and whether the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--starts", type=int, default=3, help="of both servers")
    parser.add_argument("--rounds", type=int, default=10, help="after each start")
    parser.add_argument("--requests", type=int, default=256, help="in one round of one server")
    options = parser.parse_args()
    pairs: list[Pair] = []
    with TemporaryDirectory() as folder:
        model = Path(folder) / MODEL
        prompts = Prompts(save_three_million(model))
        for _ in range(options.starts):
            pairs += measured_pairs(model, prompts, options.rounds, options.requests)
    Console().print(table_of(pairs))
    worst = max(
        compared([(on.cpu_us_per_token, off.cpu_us_per_token) for on, off in pairs])[2],
        compared([(off.tokens_per_s, on.tokens_per_s) for on, off in pairs])[2],
    )
    verdict = "within" if worst <= GOAL else "beyond"
    Console().print(f"CPU time or throughput at its worst: {worst:.3f}, {verdict} {GOAL}")


if __name__ == "__main__":
    main()
