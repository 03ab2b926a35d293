import pytest
import torch

from deployments.engine import truncation
from deployments.engine.sampling_params import SamplingParams
from deployments.engine.sampling_row import SamplingRow
from deployments.engine.truncation import weigh


def weights(params: SamplingParams, logits: torch.Tensor) -> torch.Tensor:
    row = SamplingRow(params, 0)
    return weigh(logits[None], logits.amax(-1, keepdim=True), [row])[0]


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.9), SamplingParams(top_p=0.9, top_k=30)])
def test_a_nucleus_wider_than_the_first_candidates_is_found(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(0))
    expected = weights(params, logits)
    assert int((expected > 0).sum()) > 2
    monkeypatch.setattr(truncation, "NUCLEUS_CANDIDATES", 2)
    assert torch.equal(weights(params, logits), expected)


@pytest.mark.parametrize("params", [SamplingParams(top_k=2), SamplingParams(top_p=0.5)])
def test_tokens_as_likely_as_the_last_one_kept_are_all_kept(params: SamplingParams) -> None:
    found = weights(params, torch.tensor([0.0, 1.0, 1.0, 1.0, -1.0]))
    assert (found > 0).tolist() == [False, True, True, True, False]


def test_min_p_measures_by_the_likeliest_after_the_temperature() -> None:
    logits = torch.tensor([0.0, -1.0, -2.0])
    for temperature, kept in ((1.0, 1), (2.0, 2), (0.5, 1)):
        found = weights(SamplingParams(temperature=temperature, min_p=0.5), logits)
        assert int((found > 0).sum()) == kept
