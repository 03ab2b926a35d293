import numpy as np
import pytest

from loadtest.analysis.bootstrap import (
    NUM_DRAWS,
    block_rates,
    interval,
    mean_draws,
    percentile_draws,
    relative_change,
)


@pytest.mark.parametrize("percent", [50, 95])
@pytest.mark.parametrize("num_samples", [60, 500])
def test_percentile_draws_spread_like_resampled_percentiles(percent: int, num_samples: int) -> None:
    generator = np.random.default_rng(1)
    samples = generator.gamma(3.0, 100.0, num_samples)
    resampled = np.percentile(
        samples[generator.integers(0, num_samples, (NUM_DRAWS, num_samples))], percent, axis=1
    )
    drawn = percentile_draws(samples, percent, generator)
    assert drawn.mean() == pytest.approx(resampled.mean(), rel=0.03)
    assert drawn.std() == pytest.approx(resampled.std(), rel=0.15)


def test_intervals_contain_the_truth_about_as_often_as_they_claim() -> None:
    generator = np.random.default_rng(2)
    held = 0
    for _ in range(200):
        before, after = generator.gamma(3.0, 100.0, 200), generator.gamma(3.0, 120.0, 200)
        draws = [percentile_draws(side, 50, generator) for side in (before, after)]
        found = relative_change(draws[0], draws[1])
        assert found is not None
        held += found.low <= 0.2 <= found.high
    assert 0.9 <= held / 200 <= 0.99


def test_too_few_samples_give_no_draws() -> None:
    generator = np.random.default_rng(3)
    assert percentile_draws(np.arange(39.0), 95, generator).size == 0
    assert percentile_draws(np.arange(40.0), 95, generator).size == NUM_DRAWS
    assert mean_draws(np.arange(4.0), generator).size == 0
    assert interval(np.empty(0)) is None
    assert relative_change(np.empty(0), np.ones(3)) is None


def test_means_of_many_samples_are_drawn_in_batches() -> None:
    samples = np.tile([0.0, 1.0], 5000)
    drawn = mean_draws(samples, np.random.default_rng(4))
    assert drawn.size == NUM_DRAWS
    assert drawn.std() == pytest.approx(0.5 / np.sqrt(samples.size), rel=0.1)


def test_blocks_contain_every_event_of_the_span() -> None:
    times_s = np.array([0.5, 1.5, 1.6, 19.9, 25.0])
    rates = block_rates(times_s, np.ones(5), 0.0, 20.0)
    assert rates.size == 20
    assert rates.sum() == pytest.approx(4.0)
    assert rates[1] == pytest.approx(2.0)
    assert block_rates(times_s, np.ones(5), 3.0, 3.0).size == 0
