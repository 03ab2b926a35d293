from typing import Any

import pytest
import torch

from deployments.contract.sampling_params import SamplingParams
from deployments.engine.sampling import truncation
from deployments.engine.sampling.sampler import scale
from deployments.engine.sampling.truncation import (
    KeepNuclei,
    find_candidates,
    guess_nuclei,
    read_nuclei,
    whole_nuclei,
)

LOGITS = torch.randn(40, generator=torch.Generator().manual_seed(0))


def kept(
    params: list[SamplingParams], logits: torch.Tensor, keep_nuclei: KeepNuclei = read_nuclei
) -> list[list[int]]:
    """Return the ids that each row keeps, all of the same logits."""
    batch = logits.repeat(len(params), 1)
    found: dict[int, list[int]] = {}
    for group in find_candidates(scale(batch, batch.amax(-1), params), params, keep_nuclei):
        ids = torch.arange(len(logits)).expand(len(group.rows), -1)
        ids = ids if group.token_ids is None else group.token_ids
        for row, weights, row_ids in zip(group.rows, group.weights, ids, strict=True):
            found[row] = row_ids[weights > 0].tolist()
    return [found[row] for row in range(len(params))]


def test_a_nucleus_wider_than_the_short_list_is_found_beside_narrow_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [SamplingParams(top_p=top_p) for top_p in (0.9, 0.01, 0.5, 0.99)]
    expected = kept(params, LOGITS)
    assert [len(ids) > 2 for ids in expected] == [True, False, True, True]
    monkeypatch.setattr(truncation, "SHORT_LIST", 2)
    assert kept(params, LOGITS) == expected
    assert kept(params, LOGITS, whole_nuclei) == expected


def test_a_guess_says_which_nuclei_are_wider_than_the_short_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [SamplingParams(top_p=top_p) for top_p in (0.9, 0.01, 0.5, 0.99, 0.02)]
    expected = kept(params, LOGITS)
    assert kept(params, LOGITS, guess_nuclei) == expected
    monkeypatch.setattr(truncation, "SHORT_LIST", 2)
    batch = LOGITS.repeat(len(params), 1)
    [found] = find_candidates(scale(batch, batch.amax(-1), params), params, guess_nuclei)
    assert found.is_complete is not None
    assert found.is_complete.tolist() == [False, True, False, False, True]
    # Few rows are not worth a guess, and the read that a wrong one costs.
    assert kept(params[:4], LOGITS, guess_nuclei) == expected[:4]


def test_rows_with_long_and_short_lists_each_keep_their_own_top_k(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [SamplingParams(top_k=top_k) for top_k in (1, 30, 2, 0, 7, 10**6)]
    expected = kept(params, LOGITS)
    assert [len(ids) for ids in expected] == [1, 30, 2, 40, 7, 40]
    monkeypatch.setattr(truncation, "SHORT_LIST", 2)
    assert kept(params, LOGITS) == expected


@pytest.mark.parametrize("params", [SamplingParams(top_k=2), SamplingParams(top_p=0.5)])
def test_of_equally_likely_tokens_those_with_lower_ids_are_kept(params: SamplingParams) -> None:
    assert kept([params], torch.tensor([0.0, 1.0, 1.0, 1.0, -1.0])) == [[1, 2]]


@pytest.mark.parametrize("short_list", [2, truncation.SHORT_LIST])
def test_a_nucleus_ends_with_the_token_that_reaches_top_p_exactly(
    short_list: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truncation, "SHORT_LIST", short_list)
    params = [SamplingParams(top_p=top_p) for top_p in (0.25, 0.5, 0.75)]
    assert kept(params, torch.zeros(4)) == [[0], [0, 1], [0, 1, 2]]


def test_min_p_is_relative_to_the_likeliest_token_after_temperature() -> None:
    logits = torch.tensor([0.0, -1.0, -2.0])
    params = [SamplingParams(temperature=t, min_p=0.5) for t in (1.0, 2.0, 0.5)]
    assert kept(params, logits) == [[0], [0, 1], [0]]


@pytest.mark.parametrize("narrow", [{}, {"top_k": 3}, {"top_p": 0.999}])
def test_min_p_keeps_tokens_exactly_at_its_limit_beside_rows_without_min_p(
    narrow: dict[str, Any],
) -> None:
    params = [SamplingParams(min_p=1, **narrow), SamplingParams()]
    assert kept(params, torch.tensor([0.0, 1.0, 1.0, -1.0])) == [[1, 2], [0, 1, 2, 3]]


def test_a_nucleus_is_relative_to_what_min_p_has_left() -> None:
    # Of 0.5, 0.3 and many of 0.001, min_p leaves two; the first is 0.625 of their sum.
    logits = torch.tensor([0.5, 0.3, *[0.001] * 200]).log()
    params = [SamplingParams(min_p=0.1, top_p=0.6), SamplingParams(top_p=0.6)]
    assert kept(params, logits) == [[0], [0, 1]]
