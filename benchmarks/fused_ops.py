"""Compares a traced decode step on a CPU with torch's operators and with fused ones.

The shape is Qwen2-0.5B's in bfloat16, but with a vocabulary of 1,024, since the layer of the logits
is the same in both. Each row has 64 tokens before it. Both alternate, and medians are compared,
because machines are noisy.

Run: python -m benchmarks.fused_ops
"""

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.gpu.shapes import QWEN_05B
from benchmarks.pairs import compared
from deployments.compute.cpu.attention.row_attention import find_row_attention
from deployments.compute.cpu.memory import keep_freed_memory
from deployments.device.device import num_cores
from deployments.engine.attention.kv_cache import KVCache, KVShape
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.model.loader import prepare_model
from deployments.engine.model.speedups import find_speedups
from deployments.engine.model.traced_forward import TracedForward
from deployments.plan.kv_layout import BLOCK_SIZE, KVLayout

VOCAB_SIZE = 1024
LENGTH = 64
CPU = torch.device("cpu")


def traces(num_layers: int) -> tuple[KVShape, TracedForward, TracedForward]:
    """Return the shape of the KV cache, and one model traced without and with fused operators."""
    options = {**QWEN_05B.options, "vocab_size": VOCAB_SIZE, "num_hidden_layers": num_layers}
    torch.manual_seed(0)
    config = Qwen2Config(**options)
    model = Qwen2ForCausalLM(config).to(QWEN_05B.dtype)  # type: ignore[arg-type] # mistaken for self
    prepare_model(model)
    plain, fused = (TracedForward(model, find_speedups(CPU)) for _ in range(2))
    plain.unfuse()
    return KVShape.of(config, QWEN_05B.dtype), plain, fused


@torch.inference_mode()
def step_ms(forward: TracedForward, kv: KVCache, num_rows: int) -> float:
    """Run one decode step of `num_rows` rows; return its milliseconds."""
    token_ids = torch.arange(100, 100 + num_rows)[None]
    positions = torch.full((1, num_rows), LENGTH)
    starts = tuple((i * BLOCK_SIZE,) for i in range(num_rows))
    step = PackedStep(kv, starts, (LENGTH,) * num_rows, ())
    started = time.perf_counter()
    forward(token_ids, positions, torch.arange(num_rows), step)
    return 1000 * (time.perf_counter() - started)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch-sizes", default="1,8,32", help="rows of a decode step, a list")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=30, help="steps of each kind, alternating")
    parser.add_argument("--threads", type=int, default=num_cores())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    sizes = [int(size) for size in args.batch_sizes.split(",")]
    shape, plain, fused = traces(args.layers)
    layout = KVLayout((BLOCK_SIZE,), (max(sizes),))
    kv = KVCache(
        shape,
        layout,
        max_model_len=BLOCK_SIZE,
        device=CPU,
        attend_rows=find_row_attention(shape.head_dim, shape.dtype),
    )
    table = Table(title=f"{args.layers} layers, {args.threads} thread(s), ms a step")
    for column in ("rows", "torch's operators", "fused", "ratio"):
        table.add_column(column, justify="right")
    for size in sizes:
        pairs = [
            (step_ms(plain, kv, size), step_ms(fused, kv, size)) for _ in range(args.rounds + 2)
        ][2:]
        before, after, ratio = compared(pairs)
        table.add_row(str(size), f"{before:.2f}", f"{after:.2f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
