"""Compares the engine's steps with those of an older commit, on the same models in the same run.

Each checkout gets a process of its own, with the same random weights. Rounds alternate; one process
waits while the other computes. A step's median is taken of each round, and the median of the
rounds' ratios is shown, because machines are noisy.

T has 3 million parameters, S is the shape of Qwen2-0.5B, L that of Llama-3.2-1B; all in bfloat16.
The baseline is the last commit in which each sequence held memory for the model's full length.

With --loads, only these are compared: streams in a closed loop, each sending its next request when
its answer has ended. They have random prompts. A load is the tokens of a prompt and of an answer.

Run: python -m benchmarks.engine_before
     python -m benchmarks.engine_before --loads 512/128,512/512 --concurrency 1,8,16,32 --shapes S
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.engine import half_billion
from benchmarks.old_checkout import ROOT, old_checkout
from benchmarks.pairs import compared
from benchmarks.random_model import loaded_with_tokenizer
from benchmarks.three_million import three_million
from deployments.compute.cpu.memory import keep_freed_memory
from deployments.contract.sampling_params import SamplingParams
from deployments.device.device import num_cores
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel
from deployments.engine.scheduling.sequence import SequenceRequest

BASELINE = "a14976e"
CODE = ("deployments",)
MAX_MODEL_LEN = 1024
PROMPT_TOKENS = 64
PREFILL_TOKENS = 512
NUM_STEPS = 24
NUM_LOAD_REQUESTS = 2
"""Requests of each stream of a load."""


def one_billion() -> PreTrainedModel:
    """Return the shape of Llama-3.2-1B in bfloat16 with random weights.

    Source: config.json of meta-llama/Llama-3.2-1B.
    """
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    return LlamaForCausalLM(config).bfloat16()


SHAPES: dict[str, Callable[[], PreTrainedModel]] = {
    "T": three_million,
    "S": half_billion,
    "L": one_billion,
}


def step_seconds(
    loaded: LoadedModel, count: int, num_prompt: int, num_steps: int
) -> tuple[float, ...]:
    """Return the median seconds of a decode step, or of the prefill if there are no steps."""
    engine = Engine(loaded, EngineLimits(count, MAX_MODEL_LEN, 512, prefix_caching=False))
    engine.warm_up()
    params = SamplingParams(temperature=0, max_tokens=num_steps + 8, ignore_eos=True)
    for i in range(count):
        prompt = tuple(range(10 + i, 10 + i + num_prompt))
        engine.add(SequenceRequest(str(i), prompt, params))
    started = time.perf_counter()
    while len(engine.step()) < count:  # until all prompts are prefilled
        pass
    if not num_steps:
        return (time.perf_counter() - started,)
    engine.step()
    seconds = []
    for _ in range(num_steps):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    return (statistics.median(seconds),)


def load_seconds(
    loaded: LoadedModel, num_streams: int, num_prompt: int, num_answer: int
) -> tuple[float, ...]:
    """Run a load.

    Returns:
        Its seconds, and the 50th and 95th percentile of the seconds to a request's first token.
    """
    engine = Engine(loaded, EngineLimits(num_streams, MAX_MODEL_LEN, 512, prefix_caching=False))
    engine.warm_up()
    vocab_size: int = loaded.text_config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=num_answer, ignore_eos=True)
    random = Random(0)
    numbers = iter(range(NUM_LOAD_REQUESTS * num_streams))
    began: dict[str, float] = {}
    waits: dict[str, float] = {}

    def send(number: int) -> None:
        prompt = tuple(random.randrange(vocab_size) for _ in range(num_prompt))
        engine.add(SequenceRequest(str(number), prompt, params))
        began[str(number)] = time.perf_counter()

    started = time.perf_counter()
    for first in islice(numbers, num_streams):
        send(first)
    while engine.has_work:
        # As the engine's thread does after each turn; older engines keep all their memory.
        getattr(engine, "give_back_memory", lambda: None)()
        for name, delta in engine.step():
            waits.setdefault(name, time.perf_counter() - began[name])
            if delta.finish_reason is not None and (number := next(numbers, None)) is not None:
                send(number)
    return time.perf_counter() - started, *np.percentile([*waits.values()], (50, 95))


def work(shape: str) -> None:
    """Measure as the lines of standard input say; answer each with a line of seconds."""
    keep_freed_memory()
    torch.set_num_threads(num_cores())
    torch.manual_seed(0)
    loaded = loaded_with_tokenizer(SHAPES[shape]())
    for line in sys.stdin:
        kind, *sizes = line.split()
        measure = load_seconds if kind == "load" else step_seconds
        sys.stdout.write(" ".join(map(str, measure(loaded, *map(int, sizes)))) + "\n")
        sys.stdout.flush()


@contextmanager
def worker(checkout: Path, shape: str) -> Iterator[Callable[[str], list[float]]]:
    """Start a checkout's worker; yield a function that lets it measure."""
    with subprocess.Popen(
        [sys.executable, __file__, "--worker", shape],
        # Only the code under test is the checkout's; the benchmark is this one.
        env={**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{ROOT}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told, heard = process.stdin, process.stdout

        def measure(line: str) -> list[float]:
            print(line, file=told, flush=True)
            return [float(number) for number in heard.readline().split()]

        try:
            yield measure
        finally:
            told.close()


def works(options: argparse.Namespace) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the lines that a worker takes, each with names for what it measures."""
    for load in options.loads:
        num_prompt, num_answer = load.split("/")
        for n in options.concurrency:
            name = f"{n} streams, {num_prompt} + {num_answer} tokens"
            line = f"load {n} {num_prompt} {num_answer}"
            yield line, (name, "  first token, median", "  first token, 95 %")
    if not options.loads:
        for n in options.concurrency:
            yield f"step {n} {PROMPT_TOKENS} {NUM_STEPS}", (f"decode, {n} sequences",)
        yield f"step 1 {PREFILL_TOKENS} 0", (f"prefill of {PREFILL_TOKENS} tokens",)


def compare(shape: str, options: argparse.Namespace, old: Path, table: Table) -> None:
    """Add a shape's rows to the table."""
    with ExitStack() as stack:
        before, now = (stack.enter_context(worker(path, shape)) for path in (old, ROOT))
        for line, names in works(options):
            if not options.loads:
                before(line), now(line)  # warm
            rounds = [(before(line), now(line)) for _ in range(options.rounds)]
            for i, name in enumerate(names):
                after, start, ratio = compared((ours[i], theirs[i]) for theirs, ours in rounds)
                table.add_row(
                    shape, name, f"{1000 * start:.2f}", f"{1000 * after:.2f}", f"{ratio:.3f}"
                )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--worker", choices=SHAPES, help=argparse.SUPPRESS)
    parser.add_argument("--baseline", default=BASELINE, help="the older commit")
    parser.add_argument("--shapes", default="T,S,L", help="which shapes, a list")
    parser.add_argument("--concurrency", default="1,8,32", help="numbers of sequences, a list")
    parser.add_argument("--loads", default="", help="prompt/answer tokens of loads, a list")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each, alternating")
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    options.loads = [load for load in options.loads.split(",") if load]
    options.concurrency = [int(number) for number in options.concurrency.split(",")]
    table = Table(title=f"ms, {num_cores()} thread(s); {options.baseline} and now")
    for column in ("shape", "work", "before", "now", "now / before"):
        table.add_column(column, justify="right")
    with old_checkout(options.baseline, *CODE) as old:
        for shape in options.shapes.split(","):
            compare(shape, options, old, table)
    Console().print(table)


if __name__ == "__main__":
    main()
