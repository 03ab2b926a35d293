import logging
from collections.abc import Iterator

import pytest
import torch

from deployments.compute.cpu.linear import prepacked_linear
from deployments.compute.cpu.linear.prepacked_linear import PrepackedLinear, can_prepack
from tests.compute.cpu.linear.linears import DTYPES, assert_near, linear, rows_of


@pytest.fixture
def untried() -> Iterator[None]:
    """Clear the cached result of `can_prepack` before and after the test."""
    can_prepack.cache_clear()
    yield
    can_prepack.cache_clear()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_gives_what_linear_gives(dtype: torch.dtype, bias: bool) -> None:
    layer = linear(24, 40, bias=bias, dtype=dtype)
    packed = PrepackedLinear(layer.weight, layer.bias)
    for shape in ((24,), (1, 24), (0, 24), (7, 24), (1, 5, 24), (2, 3, 24)):
        rows = rows_of(*shape, dtype=dtype)
        assert_near(packed(rows), layer(rows))


def test_rows_need_not_be_contiguous() -> None:
    layer, rows = linear(24, 40), rows_of(24, 6).T
    assert_near(PrepackedLinear(layer.weight, layer.bias)(rows), layer(rows))


def test_weights_and_bias_are_copies() -> None:
    layer, rows = linear(24, 40), rows_of(2, 24)
    packed = PrepackedLinear(layer.weight, layer.bias)
    expected = layer(rows)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    assert_near(packed(rows), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_reports_its_size(dtype: torch.dtype) -> None:
    layer = linear(24, 40, dtype=dtype)
    packed = PrepackedLinear(layer.weight, layer.bias)
    assert packed.num_bytes == (24 * 40 + 40) * dtype.itemsize
    assert repr(packed) == "PrepackedLinear(in_features=24, out_features=40)"


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8])
def test_other_dtypes_are_not_prepacked(dtype: torch.dtype) -> None:
    assert not can_prepack(dtype)


class NoOperators:
    """A build of torch without the operators."""


class WrongOperators:
    """A build of torch whose operators give other values."""

    def _reorder_linear_weight(self, weight: torch.Tensor, _: int) -> torch.Tensor:
        return weight

    def _linear_pointwise(self, rows: torch.Tensor, weight: torch.Tensor, *_: object) -> object:
        return rows @ weight.T


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("operators", [NoOperators(), WrongOperators()])
def test_missing_or_wrong_operators_are_logged_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, operators: object
) -> None:
    assert can_prepack(torch.float32)
    can_prepack.cache_clear()
    monkeypatch.setattr(prepacked_linear, "_ops", lambda: operators)
    with caplog.at_level(logging.WARNING):
        assert not can_prepack(torch.float32)
    assert "torch.float32 are not prepacked" in caplog.text
