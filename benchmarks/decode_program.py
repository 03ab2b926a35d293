"""Compares decode steps as programs of kernels with the same steps call by call.

One engine's sequences run five steps one way, then five the other way, so both meet the same
conditions. Medians are compared. Both ways give the same tokens
(tests/engine/replay/test_cpu_replay.py). "replayed" counts the steps that really were programs. The
weights have the dtype that bfloat16 models get on this CPU, unless --dtype names another. See
`cpu_shapes` for the names of shapes.

    python -m benchmarks.decode_program
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_shapes import PYDOC_CHAT, SHAPES, chosen_dtype, load_shape
from deployments.compute.host_memory import keep_freed_memory
from deployments.contract.sampling_params import SamplingParams
from deployments.device.device import num_compute_threads
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel
from deployments.engine.replay.decode_replay import DecodeReplay
from deployments.engine.scheduling.sequence import SequenceRequest

TURN = 5
"""Consecutive steps of one way. The first of them meets cold caches and is left out."""

PROMPT_TOKENS = 64


@dataclass(slots=True)
class Steps:
    """An engine's replay, and what was measured with and without it.

    Attributes:
        replay: The replay; None if the engine has none.
        calls_s: Seconds of steps call by call.
        program_s: Seconds of steps that should be programs.
        num_asked: The number of steps that should be programs.
        num_replayed: The number of steps that were programs.
    """

    replay: DecodeReplay | None
    calls_s: list[float] = field(default_factory=list)
    program_s: list[float] = field(default_factory=list)
    num_asked: int = 0
    num_replayed: int = 0

    def run(self, token_ids: Sequence[int], step: PackedStep) -> torch.Tensor | None:
        """Replay a step, and count it."""
        logits = None if self.replay is None else self.replay.run(token_ids, step)
        self.num_asked += 1
        self.num_replayed += logits is not None
        return logits


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--shapes", default=",".join((*SHAPES, PYDOC_CHAT)))
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    keep_freed_memory()
    dtype = chosen_dtype(options.dtype)
    title = str(dtype).removeprefix("torch.")
    columns = (
        "shape",
        "threads",
        "sequences",
        "call by call ms",
        "program ms",
        "ratio",
        "replayed",
    )
    table = Table(*columns, title=title)
    for name in options.shapes.split(","):
        loaded = load_shape(name, dtype)
        num_threads = num_compute_threads(loaded.num_weight_bytes)
        torch.set_num_threads(num_threads)
        for num_sequences in map(int, options.sequences.split(",")):
            steps = measure(loaded, num_sequences, options.steps)
            calls_s, program_s = median(steps.calls_s), median(steps.program_s)
            table.add_row(
                *(name, str(num_threads), str(num_sequences)),
                *(f"{1e3 * calls_s:.2f}", f"{1e3 * program_s:.2f}", f"{calls_s / program_s:.2f}"),
                f"{steps.num_replayed} of {steps.num_asked}",
            )
    Console().print(table)


def measure(loaded: LoadedModel, num_sequences: int, num_steps: int) -> Steps:
    """Time steps both ways."""
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
    runner = engine._runner
    steps = Steps(runner._replay)
    for turn in range(num_steps // (2 * TURN)):
        for is_program in (False, True) if turn % 2 else (True, False):
            with patch.object(runner, "_replay", steps if is_program else None):
                seconds = [_seconds(engine) for _ in range(TURN)]
            (steps.program_s if is_program else steps.calls_s).extend(seconds[1:])
    return steps


def _seconds(engine: Engine) -> float:
    """Run a step; return its seconds."""
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
