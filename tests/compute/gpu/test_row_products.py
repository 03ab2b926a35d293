"""Products of few rows and large weights against torch's own."""

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compute.gpu.gpu_or_interpreter import DEVICE, MATRIX_DTYPE, needs_kernels

pytestmark = needs_kernels


def random(*size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, generator=generator).to(DEVICE, MATRIX_DTYPE)


@pytest.mark.parametrize("width", [64, 192, 64 * 256])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 16, 17, 32, 33])
def test_products_equal_torchs(num_rows: int, width: int) -> None:
    from deployments.compute.gpu.row_products import multiply

    rows, weight = random(num_rows, 512), random(width, 512)
    found, expected = multiply(rows, weight), rows.float() @ weight.float().t()
    assert found.shape == (num_rows, width)
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=0.1)


def test_rows_that_lie_apart_are_multiplied() -> None:
    from deployments.compute.gpu.row_products import multiply

    rows, weight = random(7, 1024), random(64, 512)
    found, expected = multiply(rows[:, 256:768], weight), rows[:, 256:768] @ weight.t()
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0.1)


def test_a_graphs_large_products_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.compute.gpu import row_products

    taken = list[tuple[int, ...]]()
    multiply = row_products.multiply

    def take(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        taken.append(tuple(weight.shape))
        return multiply(rows, weight)

    monkeypatch.setattr(row_products, "multiply", take)
    monkeypatch.setattr(row_products, "LEAST_BYTES", 2 * 512 * 1024)
    monkeypatch.setattr(torch, "bfloat16", MATRIX_DTYPE)

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large = torch.nn.Linear(512, 1024, bias=False)
            self.biased = torch.nn.Linear(1024, 1024)
            self.small = torch.nn.Linear(1024, 128, bias=False)

        def forward(self, rows: Any) -> Any:
            return self.small(self.biased(self.large(rows)))

    layers, rows = (
        Layers().to(DEVICE, MATRIX_DTYPE).requires_grad_(requires_grad=False),
        random(3, 512),
    )
    graph = make_fx(layers)(rows)
    row_products.use_row_products(graph)
    torch.testing.assert_close(graph(rows), layers(rows), rtol=2**-6, atol=2**-6)
    assert taken == [(1024, 512)]
