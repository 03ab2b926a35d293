from itertools import product

import pytest
import torch

from deployments.engine.sampling.block_reductions import BLOCK
from deployments.engine.sampling.inverse_cdf import inverse_cdf

BELOW_ONE = 1 - 2.0**-53


@pytest.mark.parametrize("length", [1, 40, BLOCK, BLOCK + 1, 7 * BLOCK, 7 * BLOCK + 100])
def test_the_entry_at_which_the_cumulative_sum_passes_the_number_is_drawn(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    # Sums of such weights are exact in any order.
    weights = torch.randint(0, 4, (200, length), generator=generator).float()
    weights[:, length // 2] = 1.0
    numbers = torch.rand(200, dtype=torch.float64, generator=generator)
    numbers[:3] = torch.tensor([0.0, 0.5, BELOW_ONE], dtype=torch.float64)
    cumulative = weights.double().cumsum(-1)
    goals = numbers[:, None] * cumulative[:, -1:]
    assert torch.equal(inverse_cdf(weights, numbers), (cumulative <= goals).sum(-1))


@pytest.mark.parametrize("length", [3, 7 * BLOCK + 100])
def test_an_entry_of_weight_zero_is_never_drawn(length: int) -> None:
    for number, weight in product((0.0, 1e-300, 0.1, BELOW_ONE), (1.0, 1e-45, 3e38)):
        numbers = torch.full((length,), number, dtype=torch.float64)
        drawn = inverse_cdf(torch.eye(length) * weight, numbers)
        assert torch.equal(drawn, torch.arange(length)), (number, weight)


def test_weights_whose_sum_is_inexact_still_draw_a_positive_one() -> None:
    weights = torch.rand(50, 9 * BLOCK, generator=torch.Generator().manual_seed(1)) ** 20
    weights[weights < 1e-3] = 0.0
    for number in (0.0, 0.25, 0.999999, BELOW_ONE):
        drawn = inverse_cdf(weights, torch.full((50,), number, dtype=torch.float64))
        assert bool((weights.gather(-1, drawn[:, None]) > 0).all())
