import pytest
import torch

from deployments.engine.sampling.block_reductions import BLOCK
from deployments.engine.sampling.stable_top_k import argmax, stable_top_k

LENGTHS = [1, 300, 2 * BLOCK, 2 * BLOCK + 1, 5 * BLOCK + 20, 40 * BLOCK, 40 * BLOCK + 255]


def few_different_values(length: int, num_rows: int = 30) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(-9, 90, (num_rows, length), generator=generator).float() / 4


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("poison", [None, torch.nan, torch.inf, -torch.inf])
def test_maxima_and_their_first_places_equal_torchs(length: int, poison: float | None) -> None:
    values = few_different_values(length)
    if poison is not None:
        values[::2, length // 2] = poison
    maxima, places = argmax(values)
    expected = values.max(dim=-1)
    torch.testing.assert_close(maxima, expected.values, equal_nan=True, rtol=0, atol=0)
    assert torch.equal(places, expected.indices)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("num", [1, 3, 20, 150, 100_000])
def test_the_largest_values_come_in_order_and_equal_ones_by_place(length: int, num: int) -> None:
    values = few_different_values(length)
    values[1] = -values[1]
    values[2] = torch.tensor([0.0, -0.0]).repeat(length)[:length]
    values[3] = -torch.inf
    values[4, length // 3 :] = -torch.inf
    num = min(num, length)
    expected = values.sort(dim=-1, descending=True, stable=True).indices[:, :num]
    assert torch.equal(stable_top_k(values, num), expected)
