"""Compares the linear layers of a decode step: our small-batch kernel and oneDNN's.

Both run all layers of Qwen2-0.5B's shape on the same packed weights, alternating. The table shows
medians of the whole pass, and the speed at which weights are read. The weights have the dtype that
bfloat16 models get on this CPU, unless --dtype names another.

    python -m benchmarks.small_batch_linear
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_shapes import chosen_dtype
from benchmarks.pairs import compared
from deployments.compute.cpu.jit.openmp import find_parallel
from deployments.compute.cpu.linear.prepacked_linear import PrepackedLinear
from deployments.compute.cpu.linear.small_batch_kernel import make_kernel
from deployments.compute.cpu.linear.small_batch_linear import SmallBatchLinear
from deployments.device.device import num_cores

NUM_LAYERS = 24
SHAPES = ((896, 1152), (896, 896), (896, 9728), (4864, 896))
VOCABULARY = (896, 151936)

Layers = Sequence[Callable[[torch.Tensor], torch.Tensor]]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,96")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = chosen_dtype(options.dtype)
    kernel = make_kernel(is_bfloat16=dtype is torch.bfloat16)
    if kernel is None or find_parallel() is None:
        raise SystemExit(
            f"There is no kernel for {dtype} here: it needs AVX2 for float32 or AVX512_BF16 for "
            "bfloat16, and a torch built on libgomp."
        )
    shapes = [*SHAPES * NUM_LAYERS, VOCABULARY]
    theirs = [PrepackedLinear(torch.randn(n, k).to(dtype), None) for k, n in shapes]
    ours = [SmallBatchLinear(kernel, layer.packed, None) for layer in theirs]
    num_bytes = sum(dtype.itemsize * k * n for k, n in shapes)
    columns = ("rows", "oneDNN ms", "ours ms", "ratio", "ours GB/s")
    table = Table(*columns, title=str(dtype).removeprefix("torch."))
    for num_rows in map(int, options.rows.split(",")):
        inputs = [torch.randn(num_rows, k).to(dtype) for k, _ in shapes]
        pairs = [(_seconds(theirs, inputs), _seconds(ours, inputs)) for _ in range(options.rounds)]
        their_s, our_s, ratio = compared(pairs[1:])
        table.add_row(
            str(num_rows),
            f"{their_s * 1e3:.1f}",
            f"{our_s * 1e3:.1f}",
            f"{ratio:.2f}",
            f"{num_bytes / our_s / 1e9:.0f}",
        )
    Console().print(table)


@torch.inference_mode()
def _seconds(layers: Layers, inputs: Sequence[torch.Tensor]) -> float:
    started = time.perf_counter()
    for layer, rows in zip(layers, inputs, strict=True):
        layer(rows)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
