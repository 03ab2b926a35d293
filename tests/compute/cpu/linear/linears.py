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
