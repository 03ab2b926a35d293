"""Products of few rows and large weights against torch's own."""

from collections.abc import Callable
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


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Linear(512, 1024, bias=False)
        self.biased = torch.nn.Linear(1024, 1024)
        self.small = torch.nn.Linear(1024, 128, bias=False)

    def forward(self, rows: Any) -> Any:
        return self.small(self.biased(self.large(rows)))


class Watched:
    """A graph with products, and the sizes of the weights that `multiply` has taken."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        wrong: Callable[[torch.Tensor, int], torch.Tensor] = lambda products, _: products,
    ) -> None:
        from deployments.compute.gpu import row_products

        multiply, self.taken = row_products.multiply, list[tuple[int, ...]]()

        def take(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            self.taken.append((len(rows), *weight.shape))
            return wrong(multiply(rows, weight), len(rows))

        monkeypatch.setattr(row_products, "multiply", take)
        monkeypatch.setattr(row_products, "LEAST_BYTES", 2 * 512 * 1024)
        monkeypatch.setattr(torch, "bfloat16", MATRIX_DTYPE)
        layers, rows = Layers().to(DEVICE, MATRIX_DTYPE), random(3, 512)
        graph = make_fx(layers.requires_grad_(requires_grad=False))(rows)
        row_products.use_row_products(graph)
        self.tried, self.taken[:] = self.taken[:], []
        torch.testing.assert_close(graph(rows), layers(rows), rtol=2**-6, atol=2**-6)


def test_a_graphs_large_products_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    assert watched.taken == [(3, 1024, 512)]
    assert watched.tried == [(1, 1024, 512), (32, 1024, 512)]


@pytest.mark.parametrize("num_rows", [1, 32])
@pytest.mark.parametrize("change", [0.9, torch.nan])
def test_products_that_are_wrong_with_some_rows_are_torchs(
    num_rows: int,
    change: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def wrong(products: torch.Tensor, number: int) -> torch.Tensor:
        return products * change if number == num_rows else products

    assert not Watched(monkeypatch, wrong).taken
    assert "products of few rows are torch's: ours differ" in caplog.text
