from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import pytest
import torch
from torch.nn.functional import gelu, silu

from deployments.compute.cpu.fusion import ops
from tests.compute.cpu.fusion.exactness import exact

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
dtypes_as_torch = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=exact)]
)
weights = pytest.mark.parametrize("is_shifted", [False, True])

EPSILON = 1e-6
ROW_COUNTS = (1, 7, 33)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul(3).to(dtype)


def normalized(rows: torch.Tensor, weight: torch.Tensor, *, is_shifted: bool) -> torch.Tensor:
    """Normalise as transformers' models do."""
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    if is_shifted:
        return (wide * (1.0 + weight.float())).to(rows.dtype)
    return weight * wide.to(rows.dtype)


def rotated(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    low, high = heads.chunk(2, -1)
    turned = torch.cat((-high, low), -1)
    return heads * cosines.unsqueeze(1) + turned * sines.unsqueeze(1)


@pytest.mark.slow
@dtypes
@weights
def test_a_norm_equals_torchs_to_the_last_bit(is_shifted: bool, dtype: torch.dtype) -> None:
    offenders = []
    for width, num_rows in product((8, 13, 32, 100, 896, 3584, 8192, 9001), ROW_COUNTS):
        rows, weight = random(1, num_rows, width, dtype=dtype), random(width, dtype=dtype, seed=1)
        found = ops.rms_norm(rows, weight, EPSILON, is_shifted)
        if not torch.equal(found, normalized(rows, weight, is_shifted=is_shifted)):
            offenders.append((width, num_rows))
    assert offenders == []


@dtypes
@weights
def test_a_norm_reads_heads_in_place(is_shifted: bool, dtype: torch.dtype) -> None:
    for num_rows in ROW_COUNTS:
        joined, weight = random(1, num_rows, 96, dtype=dtype), random(16, dtype=dtype, seed=1)
        heads = joined[..., 16:80].view(1, num_rows, 4, 16)
        for rows in (heads, heads.transpose(1, 2)):
            found = ops.rms_norm(rows, weight, EPSILON, is_shifted)
            expected = normalized(rows, weight, is_shifted=is_shifted)
            assert torch.equal(found, expected), num_rows
        # torch adds the squares of elements that are not contiguous in another order.
        apart = heads.mT.contiguous().mT
        found = ops.rms_norm(apart, weight, EPSILON, is_shifted)
        expected = normalized(apart, weight, is_shifted=is_shifted)
        rtol = 2**-7 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(found, expected, rtol=rtol, atol=0)


@pytest.mark.slow
@dtypes
@weights
def test_a_sum_and_its_norm_equal_torchs_to_the_last_bit(
    is_shifted: bool, dtype: torch.dtype
) -> None:
    for num_rows in ROW_COUNTS:
        wide = random(1, num_rows, 2 * 896, dtype=dtype)
        rows, others = wide[..., :896], random(1, num_rows, 896, dtype=dtype, seed=1)
        weight = random(896, dtype=dtype, seed=2)
        total, found = ops.add_rms_norm(rows, others, weight, EPSILON, is_shifted)
        assert torch.equal(total, rows + others), num_rows
        expected = normalized(rows + others, weight, is_shifted=is_shifted)
        assert torch.equal(found, expected), num_rows


@dtypes
def test_a_rotation_equals_torchs_to_the_last_bit(dtype: torch.dtype) -> None:
    offenders = []
    for head_dim, num_rows in product((2, 10, 64), ROW_COUNTS):
        joined = random(1, num_rows, 5 * head_dim, dtype=dtype)
        tables = (random(1, num_rows, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
        cosines, sines = tables
        heads = joined[..., head_dim:].view(1, num_rows, 4, head_dim).transpose(1, 2)
        for view in (heads, heads.contiguous().mT.contiguous().mT):
            found = ops.rotate(view, cosines, sines)
            is_equal = torch.equal(found, rotated(view, cosines, sines))
            if not is_equal or found[0].transpose(0, 1).shape != (num_rows, 4, head_dim):
                offenders.append((head_dim, num_rows, view.stride()))
    assert offenders == []


@dtypes_as_torch
def test_a_gated_silu_equals_torchs_to_the_last_bit(dtype: torch.dtype) -> None:
    offenders = []
    for width, num_rows in product((7, 40, 48, 64, 896), ROW_COUNTS):
        plain = random(1, num_rows, 2 * width, dtype=dtype)
        strided = random(1, 2 * width, num_rows, dtype=dtype).mT
        for joined in (plain, strided):
            gate, up = joined.contiguous().chunk(2, -1)
            if not torch.equal(ops.silu_mul(joined), silu(gate) * up):
                offenders.append((width, num_rows, joined.stride()))
    assert offenders == []


@pytest.mark.parametrize("activation", [silu, partial(gelu, approximate="tanh")])
def test_a_gate_of_every_bfloat16_equals_torchs(
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    values = ops.all_bfloat16()
    joined = torch.cat((values, torch.full_like(values, 3.0)))[None, None]
    gate, up = joined.chunk(2, -1)
    found = ops.table_mul(activation(values), joined)
    assert torch.equal(found.nan_to_num(7), (activation(gate) * up).nan_to_num(7))
    if activation is silu:
        found = ops.silu_mul(joined)
        assert torch.equal(found.nan_to_num(7), (silu(gate) * up).nan_to_num(7))


def test_a_gated_gelu_is_close_to_the_exact_one() -> None:
    for width, num_rows in product((7, 48, 896), ROW_COUNTS):
        joined = 4 * random(1, num_rows, 2 * width, dtype=torch.float32)
        gate, up = joined.chunk(2, -1)
        exact = gelu(gate.double(), approximate="tanh") * up.double()
        found = ops.gelu_mul(joined)
        is_near = (found - exact).abs() <= 2**-22 * exact.abs() + 1e-7 * up.abs()
        assert torch.all(is_near), (width, num_rows)
        strided = joined.mT.contiguous().mT
        assert torch.equal(ops.gelu_mul(strided), found), (width, num_rows)


def test_a_gelu_of_extreme_values_is_torchs() -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 200.0, -200.0, 3e38, -3e38, torch.inf])
    joined = torch.cat((gate, torch.ones_like(gate)))[None, None]
    expected = gelu(gate, approximate="tanh")
    assert torch.equal(ops.gelu_mul(joined).flatten(), expected)
    joined[..., 0] = torch.nan
    assert ops.gelu_mul(joined)[0, 0, 0].isnan()


@pytest.fixture
def two_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("two_threads")
@dtypes_as_torch
def test_threads_divide_many_rows(dtype: torch.dtype) -> None:
    num_rows, width = 101, 896
    assert num_rows * width > ops.MIN_PARALLEL_ELEMENTS
    rows, others = (random(1, num_rows, width, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = random(width, dtype=dtype, seed=2)
    expected = normalized(rows, weight, is_shifted=False)
    assert torch.equal(ops.rms_norm(rows, weight, EPSILON, False), expected)
    total, found = ops.add_rms_norm(rows, others, weight, EPSILON, True)
    assert torch.equal(total, rows + others)
    assert torch.equal(found, normalized(rows + others, weight, is_shifted=True))
    heads = rows.view(1, num_rows, 14, 64).transpose(1, 2)
    tables = (random(1, num_rows, 64, dtype=dtype, seed=seed) for seed in (3, 4))
    cosines, sines = tables
    assert torch.equal(ops.rotate(heads, cosines, sines), rotated(heads, cosines, sines))
    gate, up = rows.chunk(2, -1)
    assert torch.equal(ops.silu_mul(rows), silu(gate) * up)


@dtypes
def test_a_row_that_is_not_finite_spoils_no_other(dtype: torch.dtype) -> None:
    rows, weight = random(1, 3, 64, dtype=dtype), random(64, dtype=dtype, seed=1)
    expected = ops.rms_norm(rows, weight, EPSILON, False)
    silus = ops.silu_mul(rows)
    rows[0, 1] = torch.nan
    found = ops.rms_norm(rows, weight, EPSILON, False)
    assert found[0, 1].isnan().all()
    assert torch.equal(found[0, ::2], expected[0, ::2])
    found = ops.silu_mul(rows)
    assert found[0, 1].isnan().all()
    assert torch.equal(found[0, ::2], silus[0, ::2])
