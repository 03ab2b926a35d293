"""Compares routing by prefixes with the power of two choices, Ray Serve's own routing.

First, how much of the prompts each way finds in caches: eight conversations of four turns with a
common system prompt, on three engines of the embedded chat model, and on a single one as the bound.

Then the time to a first token under a skewed load, simulated, because three engines on a few cores
would only show noise: requests arrive at random at three replicas, half of them for one popular
system prompt. A step takes 5 ms and 0.1 ms for each token to prefill. Both ways get the same
requests; the median of rounds is printed.

Run: python -m benchmarks.routing
"""

import argparse
import heapq
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.pairs import compared
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel, load_model
from deployments.engine.scheduling.sequence import SequenceRequest
from serve_app.backends.replicas.prefix_memory import PrefixMemory

FOLDER = Path(__file__).resolve().parent.parent / "models/pydoc-chat"
NUM_REPLICAS = 3
NUM_CONVERSATIONS = 8
NUM_TURNS = 4
TURN_TOKENS = 48
ANSWER_TOKENS = 16

Choose = Callable[[Sequence[int], Mapping[str, int]], str]
"""Returns a replica for a prompt with these keys, by the replicas' loads."""


def two_choices(random: Random) -> Choose:
    """Return Serve's own way: the less busy of two random replicas."""

    def choose(keys: Sequence[int], loads: Mapping[str, int]) -> str:
        del keys
        return min(random.sample(list(loads), min(2, len(loads))), key=loads.__getitem__)

    return choose


def by_prefix(random: Random) -> Choose:
    """Return the ingress's way."""
    memory, otherwise = PrefixMemory(), two_choices(random)

    def choose(keys: Sequence[int], loads: Mapping[str, int]) -> str:
        chosen = memory.choose(keys, loads) or otherwise(keys, loads)
        memory.note(keys, chosen)
        return chosen

    return choose


def cached_part(loaded: LoadedModel, num_replicas: int, choose: Choose) -> float:
    """Return which part of all prompts' tokens was taken from other sequences."""
    limits = EngineLimits(NUM_CONVERSATIONS, 1024, 512)
    engines = {f"replica {i}": Engine(loaded, limits) for i in range(num_replicas)}
    random = Random(0)
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)

    def words(number: int) -> list[int]:
        return [random.randrange(10, loaded.text_config.vocab_size) for _ in range(number)]

    system = words(128)
    talks = [[*system] for _ in range(NUM_CONVERSATIONS)]
    turns: list[list[int]] = [[] for _ in talks]
    for _ in range(NUM_TURNS):
        loads = dict.fromkeys(engines, 0)
        for i in random.sample(range(len(talks)), len(talks)):
            talks[i] += words(TURN_TOKENS)
            turns[i].append(hash((i, len(turns[i]))))
            chosen = choose([0, *turns[i]], loads)
            loads[chosen] += 1
            engines[chosen].add(SequenceRequest(str(i), tuple(talks[i]), params))
        for engine in engines.values():
            while engine.has_work:
                for name, delta in engine.step():
                    talks[int(name)] += delta.token_ids
    stats = [engine.stats for engine in engines.values()]
    return sum(s.num_cached_tokens for s in stats) / sum(s.num_prompt_tokens for s in stats)


@dataclass
class Request:
    """A simulated request.

    Attributes:
        at_s: When it arrives.
        keys: Of its prompt.
        prefix_tokens: Tokens that a replica keeps once it has computed them.
        own_tokens: Tokens that it has for itself.
        answer_tokens: Tokens of its answer.
        ttft_s: Seconds until its first token, once that has come.
    """

    at_s: float
    keys: list[int]
    prefix_tokens: int
    own_tokens: int
    answer_tokens: int
    ttft_s: float = 0.0


@dataclass
class SimulatedReplica:
    """A replica whose steps take a given time."""

    MAX_NUM_SEQS = 16
    STEP_S = 0.005
    TOKEN_S = 0.0001
    CHUNK = 512

    known: set[int] = field(default_factory=set)
    waiting: deque[tuple[Request, int]] = field(default_factory=deque)
    running: list[list[int]] = field(default_factory=list)

    def add(self, request: Request) -> None:
        """Take a request; a prefix that is known costs nothing."""
        key = request.keys[0]
        num_tokens = request.own_tokens + (0 if key in self.known else request.prefix_tokens)
        self.known.add(key)
        self.waiting.append((request, num_tokens))

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self.waiting) + len(self.running)

    def step(self, now_s: float) -> float:
        """Run a step; return when it ends."""
        budget = self.CHUNK
        begun: list[Request] = []
        while self.waiting and budget and len(self.running) + len(begun) < self.MAX_NUM_SEQS:
            request, num_tokens = self.waiting.popleft()
            taken = min(budget, num_tokens)
            budget -= taken
            if taken < num_tokens:
                self.waiting.appendleft((request, num_tokens - taken))
            else:
                begun.append(request)
        end_s = now_s + self.STEP_S + self.TOKEN_S * (self.CHUNK - budget)
        self.running = [[left - 1] for (left,) in self.running if left > 1]
        for request in begun:
            request.ttft_s = end_s - request.at_s
            self.running.append([request.answer_tokens])
        return end_s


def arrivals(random: Random, number: int, rate: float) -> Iterator[Request]:
    """Yield requests; half of them share the most popular of twenty system prompts."""
    now_s = 0.0
    for _ in range(number):
        now_s += random.expovariate(rate)
        prompt = 0 if random.random() < 0.5 else random.randrange(1, 20)
        tokens = random.randrange(20, 200), random.randrange(20, 120)
        yield Request(now_s, [prompt], 600, *tokens)


def p99_ttft_s(requests: Sequence[Request], choose: Choose) -> float:
    """Simulate a load; return the 99th percentile of the time to a first token."""
    replicas = {f"replica {i}": SimulatedReplica() for i in range(NUM_REPLICAS)}
    numbers = count()
    events: list[tuple[float, int, Request | str]] = [
        (each.at_s, next(numbers), each) for each in requests
    ]
    heapq.heapify(events)
    stepping: set[str] = set()
    while events:
        now_s, _, event = heapq.heappop(events)
        if isinstance(event, Request):
            name = choose(event.keys, {name: each.load for name, each in replicas.items()})
            replicas[name].add(event)
        else:
            name = event
            stepping.discard(name)
        if name not in stepping and replicas[name].load:
            stepping.add(name)
            heapq.heappush(events, (replicas[name].step(now_s), next(numbers), name))
    return statistics.quantiles((each.ttft_s for each in requests), n=100)[98]


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the simulation")
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(str(FOLDER), revision=None, dtype="float32", device=torch.device("cpu"))
    one = cached_part(loaded, 1, two_choices(Random(0)))
    table = Table(title=f"{NUM_CONVERSATIONS} conversations of {NUM_TURNS} turns")
    for column in ("", "prompt tokens from caches", "of one engine's"):
        table.add_column(column, justify="right")
    table.add_row("one engine", f"{one:.2f}", "1.00")
    for name, make in (("two choices", two_choices), ("by prefix", by_prefix)):
        part = cached_part(loaded, NUM_REPLICAS, make(Random(0)))
        table.add_row(f"{name}, {NUM_REPLICAS} engines", f"{part:.2f}", f"{part / one:.2f}")
    Console().print(table)
    table = Table(title="p99 of the time to a first token, skewed load, simulated, ms")
    for column in ("requests/s", "two choices", "by prefix", "ratio"):
        table.add_column(column, justify="right")
    for rate in (20.0, 40.0, 60.0):
        pairs = []
        for seed in range(args.rounds):
            loads = [list(arrivals(Random(seed), 2000, rate)) for _ in range(2)]
            ways = two_choices(Random(seed)), by_prefix(Random(seed))
            pairs.append((p99_ttft_s(loads[0], ways[0]), p99_ttft_s(loads[1], ways[1])))
        before, now, ratio = compared(pairs)
        table.add_row(f"{rate:g}", f"{1000 * before:.0f}", f"{1000 * now:.0f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
