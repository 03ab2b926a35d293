"""The attention of one decode step, with rows read in spans of their own length and in one call.

The shape is Qwen2-0.5B's: 24 layers, 14 heads on 2 key-value heads of 64, bfloat16; 32 sequences.
Both ways alternate, and the medians are compared, since machines are noisy.

Run: python -m benchmarks.decode_spans
"""

import argparse
import statistics
import time
from math import inf
from random import Random
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from deployments.engine.attention import slot_attention
from deployments.engine.decode_spans import CALL_COST_BYTES
from deployments.engine.kv_slots import KVShape, KVSlots
from deployments.engine.packed_step import PackedStep

NUM_LAYERS, NUM_HEADS, NUM_SEQS, MAX_MODEL_LEN = 24, 14, 32, 1024
SHAPE = KVShape((None,) * NUM_LAYERS, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
LAYERS = [
    cast("torch.nn.Module", SimpleNamespace(layer_idx=i, is_causal=True)) for i in range(NUM_LAYERS)
]


def workloads() -> dict[str, list[int]]:
    """Return the sequences' lengths of each workload."""
    random = Random(0)
    mixed = [random.randint(64, MAX_MODEL_LEN) for _ in range(NUM_SEQS)]
    return {
        "all 512": [512] * NUM_SEQS,
        "mixed, 64 to 1024": mixed,
        "one of 1024 among 31 of 64": [64] * 15 + [MAX_MODEL_LEN] + [64] * 16,
    }


@torch.inference_mode()
def attend(kv: KVSlots, lengths: list[int], *, is_split: bool) -> tuple[float, int]:
    """Run one step's attention; return its seconds and its calls in each layer."""
    rows = torch.randn(1, NUM_HEADS + 4, NUM_SEQS, SHAPE.head_dim, dtype=SHAPE.dtype)
    query, key, value = rows[:, :NUM_HEADS], rows[:, -4:-2], rows[:, -2:]
    step = PackedStep(kv, tuple(range(NUM_SEQS)), tuple(n - 1 for n in lengths), ())
    costs = CALL_COST_BYTES if is_split else {"cpu": inf}
    with patch.dict(CALL_COST_BYTES, costs):
        started = time.perf_counter()
        for layer in LAYERS:
            slot_attention(layer, query, key, value, None, packed_step=step)
        seconds = time.perf_counter() - started
    return seconds, len(step.decode_places(MAX_MODEL_LEN).spans)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15, help="of each, in turn")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kv = KVSlots(SHAPE, num_slots=NUM_SEQS, max_model_len=MAX_MODEL_LEN, device=torch.device("cpu"))
    title = f"{NUM_LAYERS} layers, {NUM_SEQS} sequences, {args.threads} thread(s), ms a step"
    table = Table(title=title)
    for column in ("lengths", "one call", "spans", "calls a layer", "ratio"):
        table.add_column(column, justify="right")
    for name, lengths in workloads().items():
        attend(kv, lengths, is_split=True)  # warm
        pairs = [
            (attend(kv, lengths, is_split=False), attend(kv, lengths, is_split=True))
            for _ in range(args.rounds)
        ]
        one = statistics.median(one for (one, _), _ in pairs)
        spans = statistics.median(spans for _, (spans, _) in pairs)
        ratio = statistics.median(one / spans for (one, _), (spans, _) in pairs)
        calls = pairs[0][1][1]
        row = (name, f"{1000 * one:.1f}", f"{1000 * spans:.1f}", str(calls), f"{ratio:.1f}")
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
