"""Fused operators on a GPU, each a single launch; `fuse` replaces chains of torch's by them.

They take and return what `deployments.compute.cpu.fusion.ops` do, on the GPU.
"""

import torch
import triton
from torch.nn.functional import gelu, silu

from deployments.compute.fusion.fused_operators import FusedOperators
from deployments.compute.gpu.kernels import gate_rows, norm_rows, rotate_both, store_rows
from deployments.compute.gpu.launch import on_its_gpu

MAX_WIDTH = 16_384
"""A norm holds a row in registers."""

GATE_BLOCK = 1024


@on_its_gpu
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


@on_its_gpu
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


@on_its_gpu
def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions [1, n, head_dim] to heads [1, num_heads, n, head_dim]."""
    return _rotate(cosines, sines, heads)[0]


@on_its_gpu
def rotate_pair(
    heads: torch.Tensor, others: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the same rotary positions to queries and keys, in one launch; see `rotate`."""
    rotated, others_rotated = _rotate(cosines, sines, heads, others)
    return rotated, others_rotated


def _rotate(
    cosines: torch.Tensor, sines: torch.Tensor, *given: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    both = [each if each.stride(-1) == 1 else each.contiguous() for each in given]
    cosines, sines = cosines.contiguous(), sines.contiguous()
    num_rows, head_dim = cosines.shape[-2:]
    outputs = [each.new_empty(1, num_rows, each.shape[1], head_dim) for each in both]
    half = head_dim // 2
    first, last = both[0], both[-1]
    rotate_both[(num_rows, len(both))](
        first,
        last,
        cosines,
        sines,
        outputs[0],
        outputs[-1],
        first.stride(1),
        first.stride(2),
        last.stride(1),
        last.stride(2),
        head_dim,
        num_heads=first.shape[1],
        num_others=last.shape[1],
        half=half,
        block_heads=triton.next_power_of_2(first.shape[1]),
        block_others=triton.next_power_of_2(last.shape[1]),
        block_half=triton.next_power_of_2(half),
        num_warps=4,
    )
    return tuple(output.transpose(1, 2) for output in outputs)


@on_its_gpu
def store(
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
) -> None:
    """Store the keys and values of n tokens, in one launch.

    Args:
        keys: [tokens, num_kv_heads, head_dim], contiguous.
        values: As keys.
        places: [n], int64, the place of each token.
        new_keys: [n, num_kv_heads, head_dim].
        new_values: As new_keys.
    """
    rows = [each if _is_row(each) else each.contiguous() for each in (new_keys, new_values)]
    width = keys.stride(0)
    store_rows[(len(places), 2)](
        keys,
        values,
        places,
        *rows,
        *(each.stride(0) for each in rows),
        width=width,
        block=triton.next_power_of_2(width),
        num_warps=4,
    )


def _is_row(tokens: torch.Tensor) -> bool:
    """Return whether the heads of a token lie one after the other."""
    return tokens.stride(2) == 1 and tokens.stride(1) == tokens.shape[2]


@on_its_gpu
def silu_mul(joined: torch.Tensor) -> torch.Tensor:
    """Return SiLU of the first half of [1, n, 2 * width] times the second."""
    return _gate(joined, is_gelu=False)


@on_its_gpu
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


OPERATORS = FusedOperators(
    "cuda",
    MAX_WIDTH,
    rms_norm,
    add_rms_norm,
    rotate,
    silu_mul,
    gelu_mul,
    rotate_pair=rotate_pair,
)
"""These operators, for `fuse`."""

LEAST_EQUAL = 0.99
"""The part of a norm's and a gate's elements that must equal torch's: sums are added in another
order and exponentials approximated, which changes the rounding of few."""

PROBE_EPSILON = 1e-6


@torch.inference_mode()
def find_difference(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return which operator rounds elsewhere than torch's on this device; None if none does.

    A compiler that drops roundings would change a model's answers, though each result is near.

    Args:
        dtype: bfloat16 or float32, in which nothing is rounded between operators.
        device: The model's device.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).mul(3).to(device, dtype)

    heads, cosines, sines = random(1, 4, 5, 128), random(1, 5, 128), random(1, 5, 128)
    low, high = heads.chunk(2, -1)
    turned = torch.cat((-high, low), -1) * sines[:, None]
    if dtype is torch.bfloat16:
        expected = heads * cosines[:, None] + turned
        few, all_heads = rotate_pair(heads[:, :3], heads, cosines, sines)
        found = (rotate(heads, cosines, sines), all_heads)
        if not all(torch.equal(each, expected) for each in found):
            return "rotary positions"
        if not torch.equal(few, expected[:, :3]):
            return "rotary positions"
    rows, others, weight = random(1, 5, 512), random(1, 5, 512), random(512)
    for is_shifted in (False, True):
        total, output = add_rms_norm(rows, others, weight, PROBE_EPSILON, is_shifted)
        wide = total.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + PROBE_EPSILON)
        shifted, plain = wide * (1.0 + weight.float()), weight * wide.to(dtype)
        expected = shifted.to(dtype) if is_shifted else plain
        if not torch.equal(total, rows + others) or not _are_equal(output, expected):
            return "norms"
    gate, factor = rows.split(256, dim=-1)  # type: ignore[no-untyped-call] # torch leaves it untyped
    # Far below zero, where GELU vanishes, torch's own formula has few right digits.
    is_large = gate > -1
    if not _are_equal(silu_mul(rows)[is_large], (silu(gate) * factor)[is_large]):
        return "SiLU"
    expected = gelu(gate, approximate="tanh") * factor
    if not _are_equal(gelu_mul(rows)[is_large], expected[is_large]):
        return "GELU"
    return None


def _are_equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.dtype is not torch.bfloat16:
        return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    return (found == expected).float().mean().item() >= LEAST_EQUAL
