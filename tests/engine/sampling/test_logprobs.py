import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.sampling_params import SamplingParams
from deployments.engine.sampling.row import SamplingRow
from deployments.engine.sampling.sampler import sample
from deployments.engine.scheduling.token_counts import TokenCounts
from tests.engine import reference_sampler as reference

# A few values only, so that many are equal.
LOGITS = st.lists(
    st.sampled_from([-300.0, -2.5, -0.0, 0.0, 1.0, 7.5, 200.0]), min_size=2, max_size=30
)


@given(LOGITS, st.integers(0, 20))
def test_logprobs_are_those_of_the_plain_softmax_with_equal_ones_ordered_by_id(
    logits: list[float], num_top: int
) -> None:
    params = SamplingParams(temperature=0, top_logprobs=num_top)
    [sampled] = sample(torch.tensor([logits]), [SamplingRow(params, 0)])
    assert sampled is not None
    assert sampled.logprobs is not None
    expected = reference.logprobs(logits)
    # By its bits -0.0 is below 0.0, but here both are equal.
    likeliest = sorted(range(len(logits)), key=lambda at: (-logits[at], at))[:num_top]
    found = sampled.logprobs
    assert found.chosen == pytest.approx(max(expected), rel=1e-6, abs=1e-6)
    assert [token_id for token_id, _ in found.top] == likeliest
    assert [logprob for _, logprob in found.top] == pytest.approx(
        [expected[at] for at in likeliest], rel=1e-6, abs=1e-6
    )


def test_logprobs_are_those_before_anything_changes_the_distribution() -> None:
    logits = [1.0, 3.0, 2.0, 0.0]
    params = SamplingParams(
        temperature=0.3,
        top_k=1,
        repetition_penalty=50,
        frequency_penalty=2,
        logit_bias=((3, 100.0),),
        top_logprobs=2,
    )
    row = SamplingRow(params, 0, TokenCounts((1,), (2,)), barred_token_ids=(1,))
    [sampled] = sample(torch.tensor([logits]), [row])
    assert sampled is not None
    assert sampled.token_id == 3
    assert sampled.logprobs is not None
    expected = reference.logprobs(logits)
    assert sampled.logprobs.chosen == pytest.approx(expected[3], rel=1e-6)
    assert [token_id for token_id, _ in sampled.logprobs.top] == [1, 2]


def test_rows_that_request_no_logprobs_get_none() -> None:
    params = [SamplingParams(temperature=0, top_logprobs=n) for n in (None, 0, 1, None)]
    found = sample(torch.randn(4, 10), [SamplingRow(p, 0) for p in params])
    num_top = [None if s is None or s.logprobs is None else len(s.logprobs.top) for s in found]
    assert num_top == [None, 0, 1, None]
