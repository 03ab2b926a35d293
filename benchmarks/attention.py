"""Compares the attention of one step on a CPU by torch and by raystream's own kernel.

Decoding:

- gathered: one call of torch's attention, with every row as long as the longest;
- spans: one call for each run of rows of about the same length, or for each row;
- kernel: raystream's own, in which each row has its own length.

Prefill: chunks is one call of torch's attention for each chunk; kernel is as above. All of them
also store the new tokens.

The shape is Qwen2-0.5B's: 24 layers, 14 heads on 2 key-value heads of 64, bfloat16. The ways
alternate, and medians are compared, because machines are noisy.

Run: python -m benchmarks.attention
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import inf
from random import Random
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from deployments.engine.attention import attention
from deployments.engine.attention.decode_spans import CALL_COST_BYTES
from deployments.engine.attention.kv_cache import KVCache, KVShape
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.attention.step_reads import ChunkRows
from deployments.plan.kv_layout import BLOCK_SIZE, KVLayout

NUM_LAYERS, NUM_HEADS, NUM_SEQS, MAX_MODEL_LEN = 24, 14, 32, 1024
SHAPE = KVShape((None,) * NUM_LAYERS, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
LAYERS = [
    cast("torch.nn.Module", SimpleNamespace(layer_idx=i, is_causal=True)) for i in range(NUM_LAYERS)
]
STARTS = [(i * MAX_MODEL_LEN,) for i in range(NUM_SEQS)]
DECODE_WAYS, PREFILL_WAYS = ("gathered", "spans", "kernel"), ("chunks", "kernel")

Lengths = list[int]
"""The sequences' lengths; each has one new token."""

Chunks = list[tuple[int, int]]
"""For each sequence, the first position of its new tokens and the end."""


def decode_workloads() -> dict[str, Lengths]:
    """Return the lengths of each decode workload."""
    random = Random(0)
    return {
        "one of 128": [128],
        "32 of 128": [128] * NUM_SEQS,
        "32 of 512": [512] * NUM_SEQS,
        "32, mixed, 64 to 1024": [random.randint(64, MAX_MODEL_LEN) for _ in range(NUM_SEQS)],
        "one of 1024 among 31 of 64": [64] * 15 + [MAX_MODEL_LEN] + [64] * 16,
    }


def prefill_workloads() -> dict[str, Chunks]:
    """Return the chunks of each prefill workload."""
    return {
        "one of 64": [(0, 64)],
        "8 of 64": [(0, 64)] * 8,
        "2 of 256": [(0, 256)] * 2,
        "one of 512": [(0, 512)],
        "512 after 512": [(512, 1024)],
        "64 after 960": [(960, 1024)],
    }


def make_cache() -> KVCache:
    """Return a KV cache in which each sequence has an extent of full length."""
    layout = KVLayout((MAX_MODEL_LEN,), (NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE,))
    kv = KVCache(
        SHAPE,
        layout,
        max_model_len=MAX_MODEL_LEN,
        device=torch.device("cpu"),
        attends_in_place=True,
    )
    for tensor in (*kv.keys, *kv.values):
        tensor.normal_()  # untouched memory is one page of zeros, which would stay in the cache
    return kv


def decode_step(kv: KVCache, lengths: Lengths) -> PackedStep:
    """Return a step of decode rows."""
    starts = tuple(STARTS[: len(lengths)])
    return PackedStep(kv, starts, tuple(n - 1 for n in lengths), ())


def prefill_step(kv: KVCache, chunks: Chunks) -> PackedStep:
    """Return a step of chunks."""
    ends = [*accumulate(end - start for start, end in chunks)]
    rows = [
        ChunkRows(last - (end - start), starts, start, end)
        for starts, last, (start, end) in zip(STARTS, ends, chunks, strict=False)
    ]
    return PackedStep(kv, (), (), tuple(rows))


@torch.inference_mode()
def attend(step: PackedStep, way: str) -> float:
    """Run one step's attention; return its seconds."""
    num_rows = step.num_decode + sum(chunk.end - chunk.start for chunk in step.chunks)
    # As in a layer: the heads of one merged projection.
    rows = torch.randn(1, num_rows, NUM_HEADS + 4, SHAPE.head_dim, dtype=SHAPE.dtype)
    query, key, value = rows.transpose(1, 2).split_with_sizes([NUM_HEADS, 2, 2], dim=1)
    costs = {"cpu": inf} if way == "gathered" else CALL_COST_BYTES
    with (
        patch.dict(CALL_COST_BYTES, costs),
        patch.object(step.kv, "attends_in_place", way == "kernel"),
    ):
        started = time.perf_counter()
        for layer in LAYERS:
            attention.kv_attention(layer, query, key, value, None, packed_step=step)
        return time.perf_counter() - started


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each, alternating")
    args = parser.parse_args()
    kv = make_cache()
    decoding = {n: partial(decode_step, kv, w) for n, w in decode_workloads().items()}
    prefill = {n: partial(prefill_step, kv, w) for n, w in prefill_workloads().items()}
    for num_threads in args.threads:
        torch.set_num_threads(num_threads)
        title = f"{NUM_LAYERS} layers, {num_threads} thread(s), ms a step"
        Console().print(measure(decoding, DECODE_WAYS, args.rounds, f"decoding: {title}"))
        Console().print(measure(prefill, PREFILL_WAYS, args.rounds, f"prefill: {title}"))


def measure(
    workloads: Mapping[str, Callable[[], PackedStep]],
    ways: Sequence[str],
    num_rounds: int,
    title: str,
) -> Table:
    """Return a table of workloads, with the first way's time divided by each other's."""
    table = Table(title=title)
    for column in ("tokens", *ways, *(f"{ways[0]} / {way}" for way in ways[1:])):
        table.add_column(column, justify="right")
    for name, make_step in workloads.items():
        rounds = [[attend(make_step(), way) for way in ways] for _ in range(num_rounds + 1)][1:]
        times = [statistics.median(column) for column in zip(*rounds, strict=True)]
        ratios = [
            statistics.median(each[0] / each[way] for each in rounds) for way in range(1, len(ways))
        ]
        cells = [f"{1000 * seconds:.2f}" for seconds in times] + [f"{r:.1f}" for r in ratios]
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    main()
