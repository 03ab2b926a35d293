import pytest

from models.training.detector.recipe import Recipe


def test_the_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    num_steps = 500
    shares = [Recipe().rate_share(step, num_steps) for step in range(num_steps)]
    peak = shares.index(1.0)
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert shares[-1] == pytest.approx(0.0, abs=1e-4)
