"""What `max_stall_ms` gives readers of running streams, and what it costs new requests.

The engine alone, without Ray and HTTP: clients that each send the next prompt as soon as their
answer has ended, with prompts and answers of given lengths. Rounds alternate between no bound and
each bound, in the shape of Qwen2-0.5B with random weights. The table has medians of the rounds: the
time to the first token, the gaps between tokens of one answer, and tokens a second of answers, with
the ratio to no bound in the same round.

Run: python -m benchmarks.stalls
     python -m benchmarks.stalls --clients 64 --lengths 700/100 --bounds 100 200 400
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_shapes import chosen_dtype, load_shape
from deployments.compute.host_memory import keep_freed_memory
from deployments.contract.sampling_params import SamplingParams
from deployments.device.device import num_compute_threads
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel
from deployments.engine.scheduling.sequence import SequenceRequest

STEP_TOKENS = 512


@dataclass(slots=True)
class Waits:
    """What the clients of one round waited for, in seconds.

    Attributes:
        first: To each answer's first token.
        gaps: Between two tokens of an answer.
        tokens_per_s: Of all answers.
    """

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens_per_s: float = 0.0

    @property
    def figures(self) -> tuple[float, ...]:
        """TTFT p50 and p95, gaps p50, p95 and at most, in milliseconds; tokens a second."""
        waits = (*np.percentile(self.first, (50, 95)), *np.percentile(self.gaps, (50, 95, 100)))
        return (*(1000 * float(wait) for wait in waits), self.tokens_per_s)


def run_round(
    loaded: LoadedModel, num_clients: int, lengths: tuple[int, int], turns: int, bound: int | None
) -> Waits:
    """Let each client ask `turns` times; return what they waited for."""
    num_prompt, num_answer = lengths
    limits = EngineLimits(
        num_clients,
        num_prompt + num_answer,
        STEP_TOKENS,
        max_stall_s=None if bound is None else bound / 1000,
        prefix_caching=False,
    )
    engine = Engine(loaded, limits)
    engine.warm_up()
    random = np.random.default_rng(0)
    waits = Waits()
    last_s: dict[str, float] = {}
    sent_s: dict[str, float] = {}
    num_sent = [0] * num_clients

    def send(client: int) -> None:
        name = f"{client}/{num_sent[client]}"
        num_sent[client] += 1
        prompt = tuple(int(i) for i in random.integers(0, 100_000, num_prompt))
        # Answers of unequal length keep the clients from asking all at once again.
        num_tokens = int(random.integers(num_answer // 2, num_answer + 1))
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        sent_s[name] = time.perf_counter()
        engine.add(SequenceRequest(name, prompt, params))

    started_s = time.perf_counter()
    for client in range(num_clients):
        send(client)
    while engine.has_work:
        deltas = engine.step()
        now_s = time.perf_counter()
        for name, delta in deltas:
            since = last_s.get(name)
            if since is None:
                waits.first.append(now_s - sent_s[name])
            else:
                waits.gaps.append(now_s - since)
            last_s[name] = now_s
            client = int(name.split("/")[0])
            if delta.finish_reason is not None and num_sent[client] < turns:
                send(client)
    seconds = time.perf_counter() - started_s
    waits.tokens_per_s = (len(waits.first) + len(waits.gaps)) / seconds
    return waits


def measure(
    num_clients: int,
    lengths: tuple[int, int],
    turns: int,
    bounds: Sequence[int | None],
    rounds: int,
) -> Table:
    """Return a table with a row for each bound."""
    dtype = chosen_dtype()
    loaded = load_shape("Qwen2-0.5B", dtype)
    torch.set_num_threads(num_compute_threads(loaded.num_weight_bytes))
    measured: dict[int | None, list[tuple[float, ...]]] = {bound: [] for bound in bounds}
    for _ in range(rounds):
        for bound in bounds:
            measured[bound].append(run_round(loaded, num_clients, lengths, turns, bound).figures)
    prompt, answer = lengths
    table = Table(
        title=f"{num_clients} clients, prompts of {prompt} tokens, answers of at most {answer}, "
        f"{dtype}; ms (ratio to null)"
    )
    columns = ("TTFT p50", "TTFT p95", "gap p50", "gap p95", "gap max", "tokens/s")
    table.add_column("max_stall_ms")
    for column in columns:
        table.add_column(column, justify="right")
    for bound in bounds:
        cells = []
        for i in range(len(columns)):
            median = statistics.median(figures[i] for figures in measured[bound])
            pairs = zip(measured[bound], measured[bounds[0]], strict=True)
            ratio = statistics.median(mine[i] / plain[i] for mine, plain in pairs)
            cells.append(f"{median:.0f} ({ratio:.2f})")
        table.add_row("null" if bound is None else str(bound), *cells)
    return table


def main() -> None:
    """Measure and print a table for each number of clients and each pair of lengths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 32], help="how many ask")
    parser.add_argument("--lengths", nargs="+", default=["300/40"], help="prompt/answer, in tokens")
    parser.add_argument("--bounds", type=int, nargs="+", default=[100, 200], help="in milliseconds")
    parser.add_argument("--turns", type=int, default=2, help="requests of each client")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each, alternating")
    args = parser.parse_args()
    keep_freed_memory()
    console = Console()
    for num_clients in args.clients:
        for lengths in args.lengths:
            prompt, answer = map(int, lengths.split("/"))
            bounds = (None, *args.bounds)
            table = measure(num_clients, (prompt, answer), args.turns, bounds, args.rounds)
            console.print(table)


if __name__ == "__main__":
    main()
