import torch

from deployments.contract.random_numbers import MAX_SEED, derive_seed, uniform


def test_random_numbers_are_uniform_and_differ_by_seed_and_position() -> None:
    by_position = torch.tensor([uniform(1, position) for position in range(4000)])
    by_seed = torch.tensor([uniform(seed, 1) for seed in range(4000)])
    by_choice = torch.tensor([uniform(derive_seed(5, index), 1) for index in range(4000)])
    for numbers in (by_position, by_seed, by_choice):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        histogram = torch.histc(numbers, bins=10, min=0, max=1)
        assert (histogram - 400).abs().max() < 80
    assert abs(float(torch.corrcoef(torch.stack([by_position, by_seed]))[0, 1])) < 0.06


def test_the_first_answer_keeps_the_seed_and_the_others_share_none() -> None:
    seeds = [derive_seed(seed, index) for seed in range(50) for index in range(16)]
    assert seeds[::16] == list(range(50))
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
