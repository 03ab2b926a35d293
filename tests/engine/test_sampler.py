import pytest
import torch

from deployments.engine import sampler
from deployments.engine.random_numbers import uniform
from deployments.engine.sampler import sample
from deployments.engine.sampling_row import SamplingRow
from deployments.engine.sampling_params import SamplingParams

NUM_DRAWS = 6000


def logits(vocab_size: int = 40) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)) * 2


def reference(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the distribution by the plain definition, one row, nothing clever: [vocab]."""
    scaled = row.double() / params.temperature
    order = scaled.argsort(descending=True)
    if params.top_k:
        scaled[order[params.top_k :]] = -torch.inf
    probabilities = scaled.softmax(-1)
    total, kept = 0.0, []
    for index in order.tolist():
        if total >= params.top_p:
            break
        kept.append(index)
        total += float(probabilities[index])
    nucleus = torch.zeros_like(probabilities)
    nucleus[kept] = probabilities[kept]
    return nucleus / nucleus.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.5, top_k=7),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.2, top_k=12, top_p=0.8),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=2.0, top_p=0.01),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    row = logits()
    rows = [SamplingRow(params, position) for position in range(NUM_DRAWS)]
    drawn = torch.tensor(sample(row.expand(NUM_DRAWS, -1), rows))
    counts = torch.bincount(drawn, minlength=len(row)).double() / NUM_DRAWS
    expected = reference(row, params)
    total_variation = (counts - expected).abs().sum() / 2
    assert total_variation < 0.03
    assert counts[expected == 0].sum() == 0


def test_a_nucleus_wider_than_the_first_candidates_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [SamplingRow(SamplingParams(top_p=0.9), position) for position in range(500)]
    expected = sample(logits().expand(500, -1), rows)
    monkeypatch.setattr(sampler, "NUCLEUS_CANDIDATES", 2)
    assert sample(logits().expand(500, -1), rows) == expected


def test_rows_are_sampled_by_their_own_parameters_alone() -> None:
    variants = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1, seed=3),
        SamplingParams(temperature=1, seed=3, top_k=4),
        SamplingParams(temperature=0.5, seed=9, top_p=0.5),
        SamplingParams(temperature=1e-30, seed=9),
    ]
    rows = [SamplingRow(params, 17) for params in variants]
    batch = torch.stack([logits() for _ in rows])
    assert sample(batch, rows) == [sample(batch[:1], [row])[0] for row in rows]


def test_greedy_takes_the_likeliest() -> None:
    row = SamplingRow(SamplingParams(temperature=0), 0)
    assert sample(logits()[None], [row]) == [int(logits().argmax())]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_gives_none_and_leaves_the_others(
    poison: float, temperature: float
) -> None:
    row = SamplingRow(SamplingParams(temperature=temperature, seed=1), 4)
    batch = logits().repeat(3, 1)
    batch[1, 5] = poison
    token_ids = sample(batch, [row] * 3)
    assert token_ids[1] is None
    assert token_ids[0] == token_ids[2] == sample(logits()[None], [row])[0]


def test_a_masked_vocabulary_is_still_sampled() -> None:
    row = torch.full((40,), -torch.inf)
    row[13] = 0.0
    assert sample(row[None], [SamplingRow(SamplingParams(seed=2), 0)]) == [13]


def test_random_numbers_are_uniform_and_differ_by_seed_and_position() -> None:
    by_position = torch.tensor([uniform(1, position) for position in range(4000)])
    by_seed = torch.tensor([uniform(seed, 1) for seed in range(4000)])
    for numbers in (by_position, by_seed):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        histogram = torch.histc(numbers, bins=10, min=0, max=1)
        assert (histogram - 400).abs().max() < 80
    assert abs(float(torch.corrcoef(torch.stack([by_position, by_seed]))[0, 1])) < 0.06
