"""Compares decode steps as programs of kernels with the same steps call by call.

One engine's sequences run five steps one way, then five the other way, so both meet the same
conditions. Medians are compared. Both ways give the same tokens
(tests/engine/replay/test_cpu_program.py). The weights have the dtype that bfloat16 models get on
this CPU, unless --dtype names another. See `cpu_shapes` for the names of shapes.

    python -m benchmarks.decode_program
"""

import argparse
import time
from statistics import median
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_shapes import PYDOC_CHAT, chosen_dtype, load_shape
from deployments.compute.cpu.memory import keep_freed_memory
from deployments.device.device import num_compute_threads
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel
from deployments.engine.replay.cpu_program import DecodePrograms
from deployments.engine.sampling_params import SamplingParams
from deployments.engine.scheduling.sequence import SequenceRequest

TURN = 5
"""Consecutive steps of one way. The first of them meets cold caches and is left out."""

PROMPT_TOKENS = 64


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--shapes", default=f"Qwen2-0.5B,3M,{PYDOC_CHAT}")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    keep_freed_memory()
    dtype = chosen_dtype(options.dtype)
    title = str(dtype).removeprefix("torch.")
    columns = ("shape", "threads", "sequences", "call by call ms", "program ms", "ratio")
    table = Table(*columns, title=title)
    for name in options.shapes.split(","):
        loaded = load_shape(name, dtype)
        num_threads = num_compute_threads(loaded.num_weight_bytes)
        torch.set_num_threads(num_threads)
        for num_sequences in map(int, options.sequences.split(",")):
            calls_s, program_s = measure(loaded, num_sequences, options.steps)
            cells = (f"{1e3 * calls_s:.2f}", f"{1e3 * program_s:.2f}", f"{calls_s / program_s:.2f}")
            table.add_row(name, str(num_threads), str(num_sequences), *cells)
    Console().print(table)


def measure(loaded: LoadedModel, num_sequences: int, num_steps: int) -> tuple[float, float]:
    """Return the median seconds of a step call by call, and as a program."""
    engine = Engine(loaded, EngineLimits(num_sequences, 2048, 512))
    engine.warm_up()
    params = SamplingParams(temperature=0, max_tokens=num_steps + 2 * TURN, ignore_eos=True)
    for i in range(num_sequences):
        prompt = tuple(range(10 + i, 10 + i + PROMPT_TOKENS))
        engine.add(SequenceRequest(str(i), prompt, params))
    while engine.stats.num_waiting or engine.stats.num_running < num_sequences:
        engine.step()
    for _ in range(TURN):  # prefill ends, and the program is captured
        engine.step()
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(num_steps // (2 * TURN)):
        for way in (0, 1) if turn % 2 else (1, 0):
            seconds[way].extend(_turn(engine, is_program=bool(way))[1:])
    return median(seconds[0]), median(seconds[1])


def _turn(engine: Engine, *, is_program: bool) -> list[float]:
    """Return the seconds of each step of a turn."""
    seconds = []
    way = DecodePrograms.run if is_program else lambda *_: None
    with patch.object(DecodePrograms, "run", way):
        for _ in range(TURN):
            started = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    main()
