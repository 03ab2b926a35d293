"""Linear layers and rows for them, the same in each call."""

import pytest
import torch

from deployments.compute.cpu.linear.prepacked_linear import can_prepack

packs_bfloat16 = pytest.mark.skipif(
    not can_prepack(torch.bfloat16),
    reason="needs a processor with AVX512BW or AVX-NE-CONVERT, for which torch packs bfloat16",
)

DTYPES = (torch.float32, pytest.param(torch.bfloat16, marks=packs_bfloat16))
"""Dtypes of prepacked weights."""


def linear(
    in_features: int, out_features: int, *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> torch.nn.Linear:
    """Return a layer in evaluation mode."""
    torch.manual_seed(in_features + out_features)
    layer = torch.nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    return layer.train(mode=False).requires_grad_(requires_grad=False)


def rows_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random rows."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare the results of two kernels for the same numbers, including dtype and shape."""
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class Product:
    """The product in float64 of rows and a layer's weights, for comparison."""

    def __init__(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """Compute it: [n, in_features] times [out_features, in_features]."""
        rows, weight, self._dtype = rows.double(), weight.double(), rows.dtype
        wide = torch.zeros(len(weight)).double() if bias is None else bias.double()
        self._expected = rows @ weight.T + wide
        scale = rows.abs() @ weight.abs().T + wide.abs()
        self._allowed = self._expected.abs() * torch.finfo(self._dtype).eps + scale * 2**-18

    def is_close(self, found: torch.Tensor) -> bool:
        """Compare the first rows, within one rounding of the sum and one of the result."""
        assert found.dtype is self._dtype
        found = found.view(-1, found.shape[-1])
        errors = (found.double() - self._expected[: len(found)]).abs()
        return bool(torch.all(errors <= self._allowed[: len(found)]))
