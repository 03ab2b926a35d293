"""Measures what the memory's monitor costs an engine that runs 32 streams.

The model has 3 million parameters, so its steps spend more time in Python, whose lock the monitor's
thread needs, than in arithmetic. Rounds with and without the monitor alternate, in changing order,
and each pair's ratio is taken, because machines are noisy. One sample is also timed by itself: at
one sample a second, its time is the part of a core that the monitor takes at most.

Run: python -m benchmarks.monitor
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from random import Random
from statistics import median, quantiles

import torch
from rich.console import Console

from benchmarks.engine import add_all
from benchmarks.pairs import compared
from benchmarks.random_model import loaded_with_tokenizer
from benchmarks.three_million import three_million
from deployments.compute.cpu.memory import keep_freed_memory
from deployments.contract.metric_store import MetricStore
from deployments.contract.metric_table import GENERATOR
from deployments.device.device import CpuDevice, num_compute_threads
from deployments.device.memory_readers import memory_reader
from deployments.device.monitor import INTERVAL_S, MemoryMonitor
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.replica.metrics import MemoryMetrics

NUM_STREAMS = 32
PROMPT_TOKENS = 64
NUM_TIMED_SAMPLES = 500


def make_monitor() -> MemoryMonitor:
    """Return a monitor as a replica on a CPU has it."""
    metrics = MemoryMetrics(MetricStore(GENERATOR), "m")
    return MemoryMonitor(memory_reader(CpuDevice()), on_sample=metrics.observe)


@contextmanager
def monitored(is_on: bool) -> Iterator[None]:
    """Run a monitor during the block, if it is on."""
    monitor = make_monitor()
    if is_on:
        monitor.start()
    try:
        yield
    finally:
        monitor.stop()


def speed(engine: Engine, num_tokens: int, *, is_on: bool) -> float:
    """Return the tokens per second of all streams, with the monitor or without."""
    random = Random(1)
    batch = [
        tuple(random.randrange(44, 4096) for _ in range(PROMPT_TOKENS)) for _ in range(NUM_STREAMS)
    ]
    with monitored(is_on):
        add_all(engine, batch, num_tokens)
        started = time.perf_counter()
        while engine.has_work:
            engine.step()
        return NUM_STREAMS * num_tokens / (time.perf_counter() - started)


def pairs(engine: Engine, num_tokens: int, num_pairs: int) -> Iterator[tuple[float, float]]:
    """Yield the speeds with the monitor and without, one after the other in changing order."""
    for on_first in islice(cycle((True, False)), num_pairs):
        speeds = {
            is_on: speed(engine, num_tokens, is_on=is_on) for is_on in (on_first, not on_first)
        }
        yield speeds[True], speeds[False]


def sample_seconds() -> float:
    """Return the median time of one sample."""
    monitor, taken_s = make_monitor(), list[float]()
    for _ in range(NUM_TIMED_SAMPLES):
        started = time.perf_counter()
        monitor.sample()
        taken_s.append(time.perf_counter() - started)
    return median(taken_s)


def main() -> None:
    """Measure and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream in a round")
    parser.add_argument("--pairs", type=int, default=15)
    args = parser.parse_args()
    keep_freed_memory()
    loaded = loaded_with_tokenizer(three_million())
    torch.set_num_threads(num_compute_threads(loaded.num_weight_bytes))
    limits = EngineLimits(NUM_STREAMS, PROMPT_TOKENS + args.tokens, 512, prefix_caching=False)
    engine = Engine(loaded, limits)
    engine.warm_up()
    speed(engine, args.tokens, is_on=True)  # meets cold caches
    measured = list(pairs(engine, args.tokens, args.pairs))
    on, off, ratio = compared(measured)
    low, *_, high = quantiles((one / other for one, other in measured), n=4)
    console = Console()
    console.print(
        f"{NUM_STREAMS} streams of {args.tokens} tokens, {args.pairs} pairs: {on:.0f} tokens/s "
        f"with the monitor, {off:.0f} without: ratio {ratio:.4f} "
        f"(quartiles {low:.4f} to {high:.4f})"
    )
    each_s = sample_seconds()
    console.print(
        f"one sample takes {1e6 * each_s:.0f} us: {each_s / INTERVAL_S:.3%} of a core at one in "
        f"{INTERVAL_S:g} s"
    )


if __name__ == "__main__":
    main()
