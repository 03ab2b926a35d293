"""Fused operators on a GPU, each a single launch; `fuse` replaces chains of torch's by them.

They take and return what `deployments.compute.cpu.fusion.ops` do, on the GPU.
"""

import torch
import triton

from deployments.compute.fusion.fused_operators import FusedOperators
from deployments.compute.gpu.kernels import gate_rows, norm_rows, rotate_heads

MAX_WIDTH = 16_384
"""A norm holds a row in registers."""

GATE_BLOCK = 1024


def rms_norm(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, is_shifted: bool
) -> torch.Tensor:
    """Normalise by the root of the mean square: [1, n, width] or [1, n, m, width]."""
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    output = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    has_inner = rows.dim() == 4
    num_inner = rows.shape[2] if has_inner else 1
    inner_stride = rows.stride(2) if has_inner else 0
    width = rows.shape[-1]
    _norm(
        rows.numel() // width,
        (rows, rows, weight, output, output),
        (num_inner, rows.stride(1), inner_stride, 0),
        epsilon,
        width,
        is_sum=False,
        is_shifted=is_shifted,
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
    total, output = torch.empty_like(rows), torch.empty_like(rows)
    width = rows.shape[-1]
    _norm(
        rows.shape[1],
        (rows, others, weight, total, output),
        (1, width, 0, width),
        epsilon,
        width,
        is_sum=True,
        is_shifted=is_shifted,
    )
    return total, output


def _norm(
    num_rows: int,
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, int, int, int],
    epsilon: float,
    width: int,
    *,
    is_sum: bool,
    is_shifted: bool,
) -> None:
    block = triton.next_power_of_2(width)
    norm_rows[(num_rows,)](
        *tensors,
        *strides,
        epsilon,
        width=width,
        block=block,
        is_sum=is_sum,
        is_shifted=is_shifted,
        num_warps=min(16, max(1, block // 256)),
    )


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions [1, n, head_dim] to heads [1, num_heads, n, head_dim]."""
    if heads.stride(-1) != 1:
        heads = heads.contiguous()
    cosines, sines = cosines.contiguous(), sines.contiguous()
    _, num_heads, num_rows, head_dim = heads.shape
    size = (1, num_rows, num_heads, head_dim)
    output = torch.empty(size, dtype=heads.dtype, device=heads.device)
    half = head_dim // 2
    rotate_heads[(num_rows,)](
        heads,
        cosines,
        sines,
        output,
        heads.stride(1),
        heads.stride(2),
        head_dim,
        num_heads=num_heads,
        half=half,
        block_heads=triton.next_power_of_2(num_heads),
        block_half=triton.next_power_of_2(half),
        num_warps=4,
    )
    return output.transpose(1, 2)


def silu_mul(joined: torch.Tensor) -> torch.Tensor:
    """Return SiLU of the first half of [1, n, 2 * width] times the second."""
    return _gate(joined, is_gelu=False)


def gelu_mul(joined: torch.Tensor) -> torch.Tensor:
    """Return GELU, by tanh, of the first half of [1, n, 2 * width] times the second."""
    return _gate(joined, is_gelu=True)


def _gate(joined: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    joined = joined.contiguous()
    _, num_rows, both = joined.shape
    width = both // 2
    output = torch.empty((1, num_rows, width), dtype=joined.dtype, device=joined.device)
    gate_rows[(num_rows, triton.cdiv(width, GATE_BLOCK))](
        joined, output, both, width=width, block=GATE_BLOCK, is_gelu=is_gelu, num_warps=4
    )
    return output


OPERATORS = FusedOperators("cuda", MAX_WIDTH, rms_norm, add_rms_norm, rotate, silu_mul, gelu_mul)
"""These operators, for `fuse`."""
