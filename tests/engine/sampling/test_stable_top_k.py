import pytest
import torch

from deployments.engine.sampling.block_reductions import BLOCK
from deployments.engine.sampling.stable_top_k import argmax, stable_top_k

LENGTHS = [1, 300, 2 * BLOCK, 2 * BLOCK + 1, 5 * BLOCK + 20, 40 * BLOCK, 40 * BLOCK + 255]


def few_different_values(length: int, num_rows: int = 30) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(-9, 90, (num_rows, length), generator=generator).float() / 4


@pytest.mark.parametrize("length", LENGTHS)
def test_maxima_and_their_first_places_equal_torchs(length: int) -> None:
    for poison in (None, torch.nan, torch.inf, -torch.inf):
        values = few_different_values(length)
        if poison is not None:
            values[::2, length // 2] = poison
        maxima, places = argmax(values)
        expected = values.max(dim=-1)
        torch.testing.assert_close(maxima, expected.values, equal_nan=True, rtol=0, atol=0)
        assert torch.equal(places, expected.indices), poison


@pytest.mark.parametrize("length", LENGTHS)
def test_the_largest_values_come_in_order_and_equal_ones_by_place(length: int) -> None:
    values = few_different_values(length)
    values[1] = -values[1]
    values[2] = torch.tensor([0.0, -0.0]).repeat(length)[:length]
    values[3] = -torch.inf
    values[4, length // 3 :] = -torch.inf
    values[5, -1] = 100  # what stands for places past the end must not come with it
    expected = values.sort(dim=-1, descending=True, stable=True).indices
    nums = {min(num, length) for num in (1, 3, 20, 150, 100_000)}
    assert [n for n in nums if not torch.equal(stable_top_k(values, n), expected[:, :n])] == []
