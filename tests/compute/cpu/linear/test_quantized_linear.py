from typing import Any

import pytest
import torch

from deployments.compute.cpu.linear import int8_linear
from deployments.compute.cpu.linear.int8_linear import Int8Linear, int8_obstacle, quantize

pytestmark = pytest.mark.skipif(int8_obstacle() is not None, reason=str(int8_obstacle()))

OUT, IN = 96, 80


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the layer's formula in float64."""
    row_scales = rows.abs().amax(-1, keepdim=True).double() / 127
    weight_scales = weight.abs().amax(-1, keepdim=True).double() / 127
    sums = torch.round(rows / row_scales) @ torch.round(weight / weight_scales).T
    return sums * row_scales * weight_scales.T + bias


def with_outliers() -> torch.Tensor:
    rows = tensor(6, IN, seed=3)
    rows[1, 5] = 1000
    rows[2] *= 1e-6
    rows[3, 7] = -3e4
    return rows


def test_it_computes_its_formula() -> None:
    rows, weight, bias = tensor(7, IN, seed=1), tensor(OUT, IN), tensor(OUT, seed=2)
    found = Int8Linear(weight, bias)(rows)
    assert torch.allclose(found.double(), reference(rows, weight, bias), rtol=1e-5, atol=1e-5)


def test_it_is_as_near_to_the_float_layer_as_rounding_allows() -> None:
    rows, weight = with_outliers(), tensor(OUT, IN)
    found = Int8Linear(weight, None)(rows)
    row_steps = rows.abs().amax(-1, keepdim=True) / 127
    weight_steps = weight.abs().amax(-1) / 127
    by_rows = row_steps / 2 * weight.abs().sum(-1)
    by_weights = weight_steps / 2 * (rows.abs() + row_steps / 2).sum(-1, keepdim=True)
    assert bool(((found - rows @ weight.T).abs() <= (by_rows + by_weights) * 1.001).all())


def test_a_scale_that_is_off_by_a_twentieth_shows_in_the_error() -> None:
    rows, weight = tensor(64, IN, seed=1), tensor(OUT, IN)
    expected = rows @ weight.T

    def relative_error(layer: Int8Linear) -> float:
        return float((layer(rows) - expected).norm() / expected.norm())

    layer = Int8Linear(weight, None)
    assert relative_error(layer) < 0.015
    layer._scales = layer._scales * 1.05
    assert relative_error(layer) > 0.04


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_output_has_the_dtype_of_the_rows(dtype: torch.dtype) -> None:
    rows, weight, bias = (t.to(dtype) for t in (tensor(2, 3, IN), tensor(OUT, IN), tensor(OUT)))
    found = Int8Linear(weight, bias)(rows)
    assert found.dtype is dtype
    assert found.shape == (2, 3, OUT)
    in_float32 = Int8Linear(weight.float(), bias.float())(rows.float())
    assert torch.equal(found, in_float32.to(dtype))


@pytest.mark.parametrize("count", [1, 2, 17, 300])
def test_a_rows_result_is_the_same_to_the_bit_in_any_batch(count: int) -> None:
    layer = Int8Linear(tensor(OUT, IN), tensor(OUT, seed=2))
    rows = torch.cat([with_outliers(), tensor(count, IN, seed=5)])
    together = layer(rows[None])[0]
    for i in range(len(rows)):
        assert torch.equal(layer(rows[i][None, None])[0, 0], together[i]), i


def test_a_row_that_is_not_finite_spoils_only_itself() -> None:
    layer = Int8Linear(tensor(OUT, IN), None)
    rows = tensor(4, IN, seed=1)
    before = layer(rows)
    rows[1, 3], rows[2, 0] = float("nan"), float("inf")
    after = layer(rows)
    assert not after[1:3].isfinite().any()
    assert torch.equal(after[[0, 3]], before[[0, 3]])


def test_rows_and_weights_of_zeros_give_the_bias() -> None:
    weight, bias, rows = tensor(OUT, IN), tensor(OUT, seed=2), tensor(3, IN, seed=1)
    weight[4], rows[1] = 0, 0
    found = Int8Linear(weight, bias)(rows)
    assert torch.equal(found[1], bias)
    assert torch.equal(found[:, 4], bias[4].expand(3))


@pytest.mark.parametrize("shape", [(0,), (1, 0), (0, 3)])
def test_no_rows_give_no_rows(shape: tuple[int, ...]) -> None:
    layer = Int8Linear(tensor(OUT, IN), tensor(OUT))
    assert layer(torch.empty(*shape, IN)).shape == (*shape, OUT)


def test_the_weights_given_to_it_are_not_changed() -> None:
    weight, bias = tensor(OUT, IN), tensor(OUT)
    layer = Int8Linear(weight, bias)
    assert torch.equal(weight, tensor(OUT, IN))
    before = layer(tensor(2, IN))
    weight.zero_()
    bias.zero_()
    assert torch.equal(layer(tensor(2, IN)), before)


def test_quantising_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantize(tensor(OUT, IN))
    monkeypatch.setattr(int8_linear, "OUTPUTS_AT_ONCE", 7)
    for part, expected in zip(quantize(tensor(OUT, IN)), whole, strict=True):
        assert torch.equal(part, expected)


def test_its_size_is_a_byte_per_weight_and_a_scale_per_output() -> None:
    assert Int8Linear(tensor(OUT, IN), None).num_bytes == OUT * IN + 4 * OUT
    assert Int8Linear(tensor(OUT, IN), tensor(OUT)).num_bytes == OUT * IN + 8 * OUT


def test_a_build_without_the_operator_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        return torch.ops.onednn.no_such_operator.default

    monkeypatch.setattr(int8_linear, "_product", missing)
    obstacle = int8_obstacle.__wrapped__()
    assert obstacle is not None
    assert "no_such_operator" in obstacle


def test_a_cpu_that_overflows_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(integers: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """Add pairs of products in 16 bits, as AVX2 does."""
        offset, scales = arguments[1], arguments[3]
        products = integers[:, None].int() * weight.int()
        pairs = products.view(*products.shape[:2], -1, 2).sum(-1).clamp(-(2**15), 2**15 - 1)
        sums: torch.Tensor = pairs.sum(-1) - offset * weight.int().sum(-1)
        return torch.mul(sums, scales)

    weight, _ = quantize(torch.tensor([[1.0] * 64, [-1.0] * 64, [0.5, 0.25] * 32]))
    monkeypatch.setattr(int8_linear, "_product", lambda: saturating)
    obstacle = int8_obstacle.__wrapped__()
    assert obstacle is not None
    assert "VNNI" in obstacle
