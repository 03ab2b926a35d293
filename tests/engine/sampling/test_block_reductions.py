import pytest
import torch

from deployments.engine.sampling.block_reductions import (
    BLOCK,
    maxima_of_blocks,
    sums_of_blocks,
    sums_of_rows,
)

LENGTHS = [1, BLOCK - 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 7]


def values(length: int) -> torch.Tensor:
    return torch.randn(32, length, generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_are_reduced_in_the_order_of_the_row(length: int) -> None:
    row = values(length)
    blocks = torch.split(row, BLOCK, dim=-1)
    assert torch.equal(maxima_of_blocks(row), torch.stack([b.amax(-1) for b in blocks], -1))
    sums = torch.stack([b.double().sum(-1) for b in blocks], -1)
    torch.testing.assert_close(sums_of_blocks(row), sums, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(sums_of_rows(row), sums.sum(-1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("length", [*LENGTHS, 151_936])
def test_a_row_has_the_same_sums_alone_and_in_a_batch(length: int) -> None:
    together = sums_of_blocks(values(length))
    alone = torch.cat([sums_of_blocks(row[None]) for row in values(length)])
    assert torch.equal(together, alone)
