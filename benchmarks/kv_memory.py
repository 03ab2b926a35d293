"""Compares memory for what sequences need with memory for the full length of each.

The engine gets memory for `--full-length` sequences of the model's full length, and more requests
than that at once: one in ten is long, the others are short. With `max_num_seqs` as low as that
number, each running sequence could have its full length, which is as if memory were reserved for
it. With a higher one, as many run as their tokens leave room for. Both have the same memory.
Rounds of the two alternate, on one model and the same threads, and medians are compared, because
machines are noisy. Both must give the same answers.

The model has random weights: 3 million parameters, or with `--large` the shape of Qwen2-0.5B.

Run: python -m benchmarks.kv_memory
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_shapes import load_shape
from benchmarks.pairs import compared
from deployments.compute.host_memory import keep_freed_memory
from deployments.contract.sampling_params import SamplingParams
from deployments.device.device import num_cores
from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel
from deployments.engine.scheduling.sequence import SequenceRequest

MAX_MODEL_LEN = 2048
MAX_BATCHED_TOKENS = 512
SHORT, LONG = (100, 60), (1500, 200)
"""Tokens of prompt and answer."""
NUM_TOKEN_IDS = 2000
"""Prompts hold random tokens below this one."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round.

    Attributes:
        most_running: The most sequences that ran at once.
        mean_running: How many ran, on average over the time.
        total_s: Seconds for all requests.
        wait_s: The median time to the first token, in seconds.
        answers: The token ids of each.
    """

    most_running: int
    mean_running: float
    total_s: float
    wait_s: float
    answers: tuple[tuple[int, ...], ...]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return sum(map(len, self.answers)) / self.total_s


def load(*, is_large: bool) -> LoadedModel:
    """Return a model with random weights and the embedded model's tokenizer."""
    return load_shape("Qwen2-0.5B" if is_large else "3M", torch.bfloat16)


def make_requests(number: int) -> list[SequenceRequest]:
    """Return requests of which every tenth is long, from the fifth on."""
    random = Random(0)

    def request(i: int) -> SequenceRequest:
        num_prompt, num_new = LONG if i % 10 == 4 else SHORT
        prompt = tuple(random.randrange(10, NUM_TOKEN_IDS) for _ in range(num_prompt))
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
        return SequenceRequest(str(i), prompt, params)

    return [request(i) for i in range(number)]


def run(
    loaded: LoadedModel,
    requests: Sequence[SequenceRequest],
    *,
    max_num_seqs: int,
    num_full_length: int,
) -> Round:
    """Answer all requests on a new engine; they come at once."""
    shape = KVShape.of(loaded.text_config, loaded.model.dtype)
    full = EngineLimits(num_full_length, MAX_MODEL_LEN, MAX_BATCHED_TOKENS)
    kv_blocks = full.layout(shape.group_capacities(MAX_MODEL_LEN)).num_blocks
    engine = Engine(
        loaded,
        EngineLimits(max_num_seqs, MAX_MODEL_LEN, MAX_BATCHED_TOKENS, kv_blocks=kv_blocks),
    )
    engine.warm_up()
    for request in requests:
        engine.add(request)
    return _time(engine, len(requests))


def _time(engine: Engine, num_requests: int) -> Round:
    """Run until all requests are answered."""
    answers: list[list[int]] = [[] for _ in range(num_requests)]
    waits = [0.0] * num_requests
    most, weighted, before = 0, 0.0, 0.0
    started = time.perf_counter()
    while engine.has_work:
        deltas = engine.step()
        now = time.perf_counter() - started
        num_running = engine.stats.num_running
        num_running += sum(delta.finish_reason is not None for _, delta in deltas)
        most = max(most, num_running)
        weighted += num_running * (now - before)
        before = now
        for name, delta in deltas:
            waits[int(name)] = waits[int(name)] or now
            answers[int(name)] += delta.token_ids
    frozen = tuple(map(tuple, answers))
    return Round(most, weighted / before, before, statistics.median(waits), frozen)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=64, help="requests that come at once")
    parser.add_argument("--full-length", type=int, default=8, help="sequences that memory holds")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="the higher number")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each, alternating")
    parser.add_argument("--large", action="store_true", help="the shape of Qwen2-0.5B")
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(num_cores() if args.large else max(1, num_cores() - 1))
    loaded, requests = load(is_large=args.large), make_requests(args.requests)

    def measure(max_num_seqs: int) -> Round:
        return run(loaded, requests, max_num_seqs=max_num_seqs, num_full_length=args.full_length)

    measure(args.max_num_seqs)  # warm
    pairs = [(measure(args.full_length), measure(args.max_num_seqs)) for _ in range(args.rounds)]
    if any(few.answers != many.answers for few, many in pairs):
        raise SystemExit("answers differ")
    _print(args, pairs)


def _print(args: argparse.Namespace, pairs: Sequence[tuple[Round, Round]]) -> None:
    table = Table(
        title=f"{args.requests} requests, memory for {args.full_length} of {MAX_MODEL_LEN} tokens, "
        f"{torch.get_num_threads()} thread(s)"
    )
    columns = ("", f"max_num_seqs {args.full_length}", f"max_num_seqs {args.max_num_seqs}", "ratio")
    for column in columns:
        table.add_column(column, justify="right")
    figures: dict[str, Callable[[Round], float]] = {
        "running at once, most": lambda r: r.most_running,
        "running at once, mean": lambda r: r.mean_running,
        "tokens a second": lambda r: r.tokens_per_s,
        "time to first token, median, s": lambda r: r.wait_s,
    }
    for name, figure in figures.items():
        many, few, ratio = compared((figure(many), figure(few)) for few, many in pairs)
        table.add_row(name, f"{few:.1f}", f"{many:.1f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
