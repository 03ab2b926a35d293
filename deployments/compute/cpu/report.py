"""Which of our CPU kernels this machine uses, in words."""

from collections.abc import Iterator

import torch

from deployments.compute.cpu.attention.head_shape import machine_lanes
from deployments.compute.cpu.jit.kernel_program import can_run
from deployments.compute.cpu.jit.openmp import find_parallel
from deployments.compute.cpu.linear.prepacked_linear import can_prepack
from deployments.compute.cpu.linear.quantized_linear import quantization_obstacle
from deployments.compute.cpu.linear.small_batch_kernel import find_arithmetic
from deployments.plan.processor import features, has_bfloat16


def describe_kernels() -> Iterator[tuple[str, str]]:
    """Yield what is computed, and how."""
    has_threads = find_parallel() is not None
    yield "bfloat16", "fast" if has_bfloat16() else "slow; dtype auto takes float32 instead"
    threads = "all threads" if has_threads else "one thread; see the log"
    yield "attention", f"vectors of {machine_lanes()} float32, {threads}"
    for dtype in ("float32", "bfloat16"):
        arithmetic = find_arithmetic(features(), is_bfloat16=dtype == "bfloat16")
        if arithmetic is None or not has_threads:
            others = "oneDNN's kernels" if can_prepack(getattr(torch, dtype)) else "torch's own"
            yield f"{dtype} layers", f"{others}; decode steps run call by call"
        else:
            steps = "as programs" if can_run() else "call by call"
            lanes = arithmetic.lanes
            yield (
                f"{dtype} layers",
                f"our kernel, vectors of {lanes} sums; decode steps run {steps}",
            )
    obstacle = quantization_obstacle()
    yield (
        "quantized layers",
        f"can't run: {obstacle}" if obstacle else "int8 and int4 by our kernel",
    )
