"""Fused operators, each a single kernel call; `fuse` replaces chains of torch's operators by them.

All take and return bfloat16 or float32 on the CPU. torch's threads divide the rows among them if
there is enough work for more than one.
"""

import ctypes
from functools import cache

import torch

from deployments.compute.cpu.fusion.kernels import (
    ADD_RMS_NORM,
    GELU_MUL,
    MAX_WIDTH,
    RMS_NORM,
    ROTATE,
    SILU_MUL,
    TABLE_MUL,
)
from deployments.compute.cpu.jit.launch import KernelCall, bits_of, empty, empty_like, launch
from deployments.compute.fusion.fused_operators import FusedOperators

BFLOAT16 = torch.bfloat16

ELEMENTS_PER_US = 1_000
"""Elements that one thread computes in a microsecond."""

MIN_PARALLEL_ELEMENTS = 30_000
"""Number of elements above which waking a second thread pays: about 30 us on one thread."""

UNIT_ELEMENTS = 4_096
"""About how many elements a thread takes with a ticket: two threads that took rows of 896 elements
one by one were slower than one thread, since the counter's cache line went back and forth."""


def rms_norm(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, is_shifted: bool
) -> torch.Tensor:
    """Normalise by the root of the mean square.

    Args:
        rows: [1, n, width] or [1, n, m, width].
        weight: [width], contiguous.
        epsilon: Added to the mean square.
        is_shifted: Whether rows are multiplied by 1 + weight, in float32, as Gemma does.
    """
    *outer, inner, element = rows.stride()
    if element != 1:
        rows = rows.contiguous()
        *outer, inner, _ = rows.stride()
    output = empty_like(rows)
    *output_outer, output_inner, _ = output.stride()
    _, *num_outer, num_inner, width = rows.shape
    _run(
        RMS_NORM.address(is_shifted, is_bfloat16=rows.dtype is BFLOAT16),
        num_inner * (num_outer[0] if num_outer else 1),
        rows.numel(),
        rows.data_ptr(),
        weight.data_ptr(),
        output.data_ptr(),
        num_inner,
        width,
        bits_of(epsilon),
        outer[-1],
        inner,
        output_outer[-1],
        output_inner,
    )
    return output


def add_rms_norm(
    rows: torch.Tensor,
    others: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    is_shifted: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of [1, n, width] and [1, n, width], and the normalised sum."""
    rows, others = rows.contiguous(), others.contiguous()
    total, output = empty_like(rows), empty_like(rows)
    _, num_rows, width = rows.shape
    _run(
        ADD_RMS_NORM.address(is_shifted, is_bfloat16=rows.dtype is BFLOAT16),
        num_rows,
        rows.numel(),
        rows.data_ptr(),
        others.data_ptr(),
        weight.data_ptr(),
        total.data_ptr(),
        output.data_ptr(),
        width,
        bits_of(epsilon),
    )
    return total, output


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to heads.

    Args:
        heads: [1, num_heads, n, head_dim].
        cosines: [1, n, head_dim].
        sines: [1, n, head_dim].
    """
    _, head_stride, row_stride, element = heads.stride()
    if element != 1:
        heads = heads.contiguous()
        _, head_stride, row_stride, _ = heads.stride()
    output = empty_like(heads)
    _, output_head_stride, output_row_stride, _ = output.stride()
    _, num_heads, num_rows, head_dim = heads.shape
    _run(
        ROTATE.address(is_bfloat16=heads.dtype is BFLOAT16),
        num_rows,
        heads.numel(),
        heads.data_ptr(),
        cosines.contiguous().data_ptr(),
        sines.contiguous().data_ptr(),
        output.data_ptr(),
        num_heads,
        head_dim,
        head_stride,
        row_stride,
        output_head_stride,
        output_row_stride,
    )
    return output


def silu_mul(joined: torch.Tensor) -> torch.Tensor:
    """Return SiLU of the first half of [1, n, 2 * width] times the second."""
    kernel = SILU_MUL.address(_vector_bytes(), is_bfloat16=joined.dtype is BFLOAT16)
    return _run_on_halves(kernel, joined)


def gelu_mul(joined: torch.Tensor) -> torch.Tensor:
    """Return GELU of the first half of [1, n, 2 * width] times the second; all float32."""
    return _run_on_halves(GELU_MUL.address(is_bfloat16=False), joined)


@cache
def _vector_bytes() -> int:
    return 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32


def table_mul(table: torch.Tensor, joined: torch.Tensor) -> torch.Tensor:
    """Return an activation of the first half of [1, n, 2 * width] times the second.

    Args:
        table: The activation of every bfloat16, indexed by its bits; see `all_bfloat16`.
        joined: bfloat16.
    """
    return _run_on_halves(TABLE_MUL.address(is_bfloat16=True), joined, table.data_ptr())


def all_bfloat16() -> torch.Tensor:
    """Return all 65,536 values of bfloat16, in the order of their bits."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(BFLOAT16)


def _run_on_halves(kernel: int, joined: torch.Tensor, *arguments: int) -> torch.Tensor:
    """Run a kernel that takes [1, n, 2 * width] and returns [1, n, width]."""
    joined = joined.contiguous()
    _, num_rows, both = joined.shape
    output = empty((1, num_rows, both // 2), joined.dtype)
    addresses = *arguments, joined.data_ptr(), output.data_ptr()
    _run(kernel, num_rows, output.numel(), *addresses, both // 2)
    return output


def _run(kernel: int, num_rows: int, num_elements: int, *arguments: int) -> None:
    """Run a kernel on rows of `num_elements` elements in total.

    Args:
        kernel: The kernel.
        num_rows: The rows that its threads take.
        num_elements: All elements, from which the number of threads follows.
        *arguments: The kernel's own, in the order of their names in `kernels`.
    """
    unit_rows = max(1, UNIT_ELEMENTS * num_rows // max(1, num_elements))
    array = _array_type(3 + len(arguments))(0, num_rows, unit_rows, *arguments)
    is_brief = num_elements < MIN_PARALLEL_ELEMENTS
    num_threads = 1 if is_brief else min(num_rows, torch.get_num_threads())
    launch(KernelCall(kernel, array), num_threads, num_elements / ELEMENTS_PER_US)


@cache
def _array_type(length: int) -> type[ctypes.Array[ctypes.c_int64]]:
    return ctypes.c_int64 * length


OPERATORS = FusedOperators(
    "cpu",
    MAX_WIDTH,
    rms_norm,
    add_rms_norm,
    rotate,
    silu_mul,
    gelu_mul,
    table_mul,
    all_bfloat16,
)
"""These operators, for `fuse`."""
