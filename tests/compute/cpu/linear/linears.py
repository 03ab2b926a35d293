"""Linear layers and rows for them, the same at each call."""

import torch


def linear(
    in_features: int, out_features: int, *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> torch.nn.Linear:
    """Return a layer in evaluation mode."""
    torch.manual_seed(in_features + out_features)
    layer = torch.nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    return layer.train(mode=False).requires_grad_(requires_grad=False)


def rows_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return rows that differ."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare what two kernels made of the same numbers, type and shape included."""
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
