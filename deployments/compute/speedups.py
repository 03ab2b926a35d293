"""The door to our kernels: engine, poolers and commands import nothing of `compute.cpu` and `gpu`.

llvmlite compiles the CPU's kernels, and a machine with a GPU may lack it. Triton compiles the
GPU's, and a machine without one lacks that. So functions import what needs either when they are
called.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from deployments.compute.cpu.attention.row_attention import KVRows, attend_rows, can_attend_rows
from deployments.compute.cpu.jit.launch import releasing_gil
from deployments.compute.cpu.linear.packed_embedding import is_tied, look_up_in_head
from deployments.compute.cpu.linear.prepack import (
    is_single_row_exact,
    leave_file,
    num_weight_bytes,
    prepack,
)
from deployments.compute.cpu.linear.prepacked_linear import can_prepack
from deployments.compute.cpu.linear.quantization import check_quantization, quantize_model
from deployments.compute.cpu.linear.stored_weights import StoredWeights
from deployments.compute.device_errors import is_of_device
from deployments.compute.fusion.fuse import fuse
from deployments.compute.fusion.fused_operators import FusedOperators
from deployments.compute.gpu.device_memory import DeviceMemory, DeviceWeights
from deployments.compute.traced_model.kept_trace import KeptTrace
from deployments.plan.processor import features, has_bfloat16

__all__ = (
    "AttendRows",
    "DeviceMemory",
    "KVRows",
    "Store",
    "StoredWeights",
    "attend_rows",
    "can_attend_rows",
    "check_quantization",
    "describe_kernels",
    "find_store",
    "fuse_on_cpu",
    "fuse_on_gpu",
    "has_kernels",
    "import_row_attention",
    "import_row_product",
    "is_single_row_exact",
    "num_weight_bytes",
    "open_kept_trace",
    "open_weights",
    "pack_weights",
    "releasing_gil",
    "unless_triton_fails",
)


logger = logging.getLogger(__name__)

Found = TypeVar("Found")

FUSED_ON_GPU = (torch.bfloat16, torch.float32)
"""The types whose roundings the GPU's fused operators reproduce."""


def has_kernels(device: torch.device) -> bool:
    """Return whether a device runs these kernels."""
    return device.type == "cpu"


def open_kept_trace(model: torch.nn.Module, purpose: str) -> KeptTrace:
    """Return the place on disk of a trace whose operators are fused on the CPU.

    Args:
        model: On the CPU, its weights packed.
        purpose: Tells traces of one model apart.
    """
    from deployments.compute.cpu.fusion.ops import OPERATORS

    return KeptTrace(model, OPERATORS, purpose)


def fuse_on_cpu(graph: torch.fx.GraphModule) -> torch.fx.GraphModule | None:
    """Return a copy of a graph with the CPU's fused operators; None if none can be fused.

    Args:
        graph: Traced by `trace_graph`; its weights are packed.
    """
    from deployments.compute.cpu.fusion.ops import OPERATORS

    return fuse(graph, OPERATORS)


def fuse_on_gpu(
    graph: torch.fx.GraphModule, dtype: torch.dtype, device: torch.device
) -> torch.fx.GraphModule | None:
    """Return a copy of a graph with the GPU's fused operators; None if torch's must stay.

    Args:
        graph: Traced by `trace_graph`, on a GPU.
        dtype: The model's.
        device: The model's.

    Raises:
        RuntimeError: The device is lost, or its memory ran out.
    """
    if dtype not in FUSED_ON_GPU:
        # Before Triton compiles anything.
        logger.info("operators are not fused: %s has no fused ones", dtype)
        return None

    def find() -> FusedOperators | None:
        from deployments.compute.gpu.ops import OPERATORS, find_difference

        difference = find_difference(dtype, device)
        if difference is None:
            return OPERATORS
        logger.warning("operators are not fused: those of %s round elsewhere", difference)
        return None

    operators = unless_triton_fails(find, "operators are not fused")
    fused = None if operators is None else fuse(graph, operators)
    if fused is not None:
        unless_triton_fails(partial(_use_row_products, fused), "products of few rows are torch's")
    return fused


def _use_row_products(graph: torch.fx.GraphModule) -> None:
    from deployments.compute.gpu.row_products import use_row_products

    use_row_products(graph)


def unless_triton_fails(find: Callable[[], Found], otherwise: str) -> Found | None:
    """Return what is found; None, and the reason in the log, if Triton fails.

    Triton may be missing, lack a C compiler, or be unable to run a kernel on this GPU.

    Args:
        find: Imports what needs Triton, and tries it.
        otherwise: What is done without it, in words.

    Raises:
        RuntimeError: The device is lost, or its memory ran out: it would be done without for good.
    """
    try:
        return find()
    except Exception as error:  # Triton's own errors have no common class
        if is_of_device(error):
            raise
        logger.warning("%s: %s: %s", otherwise, type(error).__name__, error)
        return None


Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Stores tokens: takes keys, values, places, new keys and new values; see `gpu.ops.store`."""


def find_store(device: torch.device) -> Store | None:
    """Return what stores keys and values on a GPU in one launch; None if torch has to.

    Raises:
        RuntimeError: The device is lost, or its memory ran out.
    """
    if device.type != "cuda":
        return None

    def find() -> Store | None:
        from deployments.compute.gpu.ops import store

        rows = torch.arange(12, device=device).view(3, 2, 2).float()
        keys, values = torch.zeros_like(rows), torch.zeros_like(rows)
        store(keys, values, torch.tensor([2, 0], device=device), rows[:2], -rows[:2])
        if torch.equal(keys[[2, 0]], rows[:2]) and torch.equal(keys, -values):
            return store
        logger.warning("keys and values are stored apart: they would differ")
        return None

    return unless_triton_fails(find, "keys and values are stored apart")


AttendRows = Callable[
    [
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        int,
        float | None,
    ],
    torch.Tensor,
]
"""Attends with one query of each sequence: takes queries, keys, values, starts, lengths, the
longest length and the scale; see `gpu.row_attention.attend_rows`."""


def import_row_attention() -> AttendRows:
    """Return the GPU's attention of decode rows.

    Raises:
        ImportError: Triton is missing.
    """
    from deployments.compute.gpu.row_attention import attend_rows

    return attend_rows


def import_row_product() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the GPU's product of few rows and large weights; see `gpu.row_products.multiply`.

    Raises:
        ImportError: Triton is missing.
    """
    from deployments.compute.gpu.row_products import multiply

    return multiply


def pack_weights(model: torch.nn.Module, quantization: str | None = None) -> None:
    """Quantize a model's weights if asked to, and lay them out for the kernels, in place.

    Args:
        model: On the CPU; a language model if it is to be quantized.
        quantization: As `check_quantization` accepts it.

    Raises:
        UnsupportedModelError: The model can't be quantized.
    """
    if quantization is not None:
        assert isinstance(model, PreTrainedModel)
        quantize_model(model, quantization)
    was_tied = is_tied(model)
    prepack(model)
    if was_tied:
        look_up_in_head(model)
    leave_file(model)


def open_weights(model: torch.nn.Module, device: torch.device) -> StoredWeights | DeviceWeights:
    """Return what gives the memory of a model's weights back, and fills it again.

    Args:
        model: As it will run: packed on a CPU, and on its device.
        device: The device.
    """
    return StoredWeights(model) if has_kernels(device) else DeviceWeights(model, device)


def describe_kernels() -> Iterator[tuple[str, str]]:
    """Yield what is computed on this machine, and how, in words."""
    from deployments.compute.cpu.attention.head_shape import machine_lanes
    from deployments.compute.cpu.jit.kernel_program import can_run
    from deployments.compute.cpu.jit.openmp import find_parallel
    from deployments.compute.cpu.linear.quantized_linear import quantization_obstacle
    from deployments.compute.cpu.linear.tiling import find_arithmetic

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
            how = f"our kernel, vectors of {arithmetic.lanes} sums; decode steps run {steps}"
            yield f"{dtype} layers", how
    obstacle = quantization_obstacle()
    yield (
        "quantized layers",
        f"can't run: {obstacle}" if obstacle else "int8 and int4 by our kernel",
    )
