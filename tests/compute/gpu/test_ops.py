"""The GPU's fused operators against torch's own."""

from itertools import product

import pytest
import torch
from torch.nn.functional import gelu, silu

from tests.compute.gpu.gpu_or_interpreter import DEVICE, needs_kernels

pytestmark = needs_kernels

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])

EPSILON = 1e-6


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul(3).to(DEVICE, dtype)


def normalized(rows: torch.Tensor, weight: torch.Tensor, *, is_shifted: bool) -> torch.Tensor:
    """Normalise as transformers' models do."""
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    if is_shifted:
        return (wide * (1.0 + weight.float())).to(rows.dtype)
    return weight * wide.to(rows.dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Allow a unit in the last place: sums are added in another order."""
    tolerance = 2**-7 if found.dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@dtypes
def test_nothing_rounds_elsewhere_than_torch(dtype: torch.dtype) -> None:
    from deployments.compute.gpu.ops import find_difference

    assert find_difference(dtype, DEVICE) is None


def test_an_operator_that_rounds_once_too_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.compute.gpu import ops

    def too_exact(heads: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        return right(heads.float(), *(table.float() for table in tables)).to(heads.dtype)

    right = ops.rotate
    monkeypatch.setattr(ops, "rotate", too_exact)
    assert ops.find_difference(torch.bfloat16, DEVICE) == "rotary positions"


def test_a_pair_of_which_one_is_not_rotated_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.compute.gpu import ops

    right = ops.rotate_pair
    for swap in (False, True):

        def wrong(*given: torch.Tensor, swap: bool = swap) -> tuple[torch.Tensor, ...]:
            found = right(*given)
            return (given[0], found[1]) if swap else (found[0], given[1])

        monkeypatch.setattr(ops, "rotate_pair", wrong)
        assert ops.find_difference(torch.bfloat16, DEVICE) == "rotary positions"


@dtypes
@pytest.mark.parametrize("is_shifted", [False, True])
def test_norms_equal_torchs(is_shifted: bool, dtype: torch.dtype) -> None:
    from deployments.compute.gpu import ops

    for width, num_rows in product((8, 100, 896, 3584), (1, 5)):
        weight = random(width, dtype=dtype, seed=1)
        rows = random(1, num_rows, 2 * width, dtype=dtype)[..., width:]
        expected = normalized(rows, weight, is_shifted=is_shifted)
        assert_near(ops.rms_norm(rows, weight, EPSILON, is_shifted), expected)
        others = random(1, num_rows, width, dtype=dtype, seed=2)
        total, output = ops.add_rms_norm(rows, others, weight, EPSILON, is_shifted)
        assert torch.equal(total, rows + others)
        assert_near(output, normalized(rows + others, weight, is_shifted=is_shifted))


@dtypes
def test_a_norm_reads_heads_in_place(dtype: torch.dtype) -> None:
    from deployments.compute.gpu import ops

    joined, weight = random(1, 5, 96, dtype=dtype), random(16, dtype=dtype, seed=1)
    heads = joined[..., 16:80].view(1, 5, 4, 16)
    for rows in (heads, heads.transpose(1, 2)):
        found = ops.rms_norm(rows, weight, EPSILON, is_shifted=False)
        assert_near(found, normalized(rows, weight, is_shifted=False))


@dtypes
@pytest.mark.parametrize(("num_heads", "head_dim"), [(28, 128), (4, 128), (3, 16), (16, 256)])
def test_rotary_positions_equal_torchs(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    from deployments.compute.gpu import ops

    for num_rows in (1, 5):
        size = num_heads * head_dim
        joined = random(1, num_rows, size + 24, dtype=dtype)
        heads = joined[..., 8 : 8 + size].view(1, num_rows, num_heads, head_dim).transpose(1, 2)
        cosines, sines = (random(1, num_rows, head_dim, dtype=dtype, seed=i) for i in (1, 2))
        low, high = heads.chunk(2, -1)
        turned = torch.cat((-high, low), -1)
        expected = heads * cosines.unsqueeze(1) + turned * sines.unsqueeze(1)
        found = ops.rotate(heads, cosines, sines)
        assert found.shape == expected.shape
        assert found[0].transpose(0, 1).is_contiguous()
        if dtype is torch.bfloat16:
            assert torch.equal(found, expected)
        else:
            assert_near(found, expected)


@dtypes
@pytest.mark.parametrize(("num_heads", "num_others"), [(28, 4), (3, 3), (16, 8)])
def test_a_pair_is_rotated_as_each_alone(
    num_heads: int, num_others: int, dtype: torch.dtype
) -> None:
    from deployments.compute.gpu import ops

    joined = random(1, 5, (num_heads + num_others) * 64, dtype=dtype)
    heads, others = (
        part.view(1, 5, -1, 64).transpose(1, 2)
        for part in torch.split(joined, [num_heads * 64, num_others * 64], dim=-1)
    )
    cosines, sines = (random(1, 5, 64, dtype=dtype, seed=i) for i in (1, 2))
    found, others_found = ops.rotate_pair(heads, others, cosines, sines)
    assert torch.equal(found, ops.rotate(heads, cosines, sines))
    assert torch.equal(others_found, ops.rotate(others, cosines, sines))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 80, 256])
def test_tokens_are_stored_as_torch_stores_them(head_dim: int, dtype: torch.dtype) -> None:
    from deployments.compute.gpu import ops

    joined = random(5, 7 * head_dim, dtype=dtype).view(5, 7, head_dim)
    places = torch.tensor([9, 0, 4, 11, 2], device=DEVICE)
    # As a layer makes them: keys by themselves, values as a part of a product.
    new_keys, new_values = joined[:, :3].contiguous(), joined[:, 4:]
    apart = new_keys.transpose(0, 1).contiguous().transpose(0, 1)
    for new in (new_keys, apart):
        keys, values = (random(12, 3, head_dim, dtype=dtype, seed=i) for i in (1, 2))
        expected = keys.index_copy(0, places, new), values.index_copy(0, places, new_values)
        ops.store(keys, values, places, new, new_values)
        assert torch.equal(keys, expected[0])
        assert torch.equal(values, expected[1])


@dtypes
def test_gates_equal_torchs(dtype: torch.dtype) -> None:
    from deployments.compute.gpu import ops

    for width, num_rows in product((8, 1500, 4864), (1, 5)):
        joined = random(1, num_rows, 2 * width, dtype=dtype)
        gate, factor = torch.split(joined, width, dim=-1)
        assert_near(ops.silu_mul(joined), silu(gate) * factor)
        assert_near(ops.gelu_mul(joined), gelu(gate, approximate="tanh") * factor)
