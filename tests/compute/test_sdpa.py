from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from deployments.compute import sdpa
from deployments.compute.sdpa import Scores, attend, disable_cudnn_attention

HEADS, GROUPS, QUERIES, KEYS, HEAD_DIM = 2, 3, 5, 5, 4


def tensors(*, is_expanded: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query = torch.randn(HEADS, GROUPS, QUERIES, HEAD_DIM) * 3
    groups = 1 if is_expanded else GROUPS
    key, value = torch.randn(2, HEADS, groups, KEYS, HEAD_DIM).expand(-1, -1, GROUPS, -1, -1)
    return query, key, value


def lower_triangle() -> torch.Tensor:
    return torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()


MASKS = {
    "none": None,
    "rows": lower_triangle(),
    "one for all rows": torch.tensor([True, False, True, True, False])[None, None, None],
}


@pytest.mark.parametrize("is_expanded", [True, False])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_scores_are_bounded_before_the_mask_for_any_number_of_rows_at_once(
    monkeypatch: pytest.MonkeyPatch, mask: torch.Tensor | None, is_expanded: bool
) -> None:
    query, key, value = tensors(is_expanded=is_expanded)
    bounded = 2.0 * (query @ key.transpose(-1, -2) * 0.5 / 2.0).tanh()
    if mask is not None:
        bounded = bounded.masked_fill(~mask, -torch.inf)
    scores = Scores(scale=0.5, softcap=2.0)
    for max_scores in (1, HEADS * GROUPS * KEYS * 2, 10**6):
        monkeypatch.setattr(sdpa, "MAX_SCORES", max_scores)
        output = attend(query, key, value, attn_mask=mask, is_causal=False, scores=scores)
        torch.testing.assert_close(output, bounded.softmax(-1) @ value)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("size", [(1, GROUPS, QUERIES), (HEADS, GROUPS, 1)])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_sink_takes_part_in_the_softmax_for_any_number_of_rows_at_once(
    monkeypatch: pytest.MonkeyPatch,
    mask: torch.Tensor | None,
    size: tuple[int, int, int],
    softcap: float | None,
) -> None:
    query, key, value = tensors(is_expanded=True)
    sinks = torch.randn(size)
    products = query @ key.transpose(-1, -2) * 0.5
    if softcap is not None:
        products = softcap * (products / softcap).tanh()
    if mask is not None:
        products = products.masked_fill(~mask, -torch.inf)
    column = sinks.expand(HEADS, GROUPS, QUERIES)[..., None]
    expected = torch.cat([products, column], dim=-1).softmax(-1)[..., :KEYS] @ value
    scores = Scores(scale=0.5, softcap=softcap, sinks=sinks)
    for max_scores in (1, HEADS * GROUPS * KEYS * 2, 10**6):
        monkeypatch.setattr(sdpa, "MAX_SCORES", max_scores)
        output = attend(query, key, value, attn_mask=mask, is_causal=False, scores=scores)
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("max_scores", [1, 10**6])
def test_causal_is_the_mask_of_the_lower_triangle(
    monkeypatch: pytest.MonkeyPatch, max_scores: int
) -> None:
    monkeypatch.setattr(sdpa, "MAX_SCORES", max_scores)
    query, key, value = tensors(is_expanded=True)
    scores = Scores(scale=None, softcap=2.0)
    causal = attend(query, key, value, attn_mask=None, is_causal=True, scores=scores)
    masked = attend(query, key, value, attn_mask=lower_triangle(), is_causal=False, scores=scores)
    torch.testing.assert_close(causal, masked)


@pytest.mark.parametrize("softcap", [None, 1e6])
def test_without_a_bound_or_with_a_very_large_one_it_equals_torchs_attention(
    softcap: float | None,
) -> None:
    query, key, value = tensors(is_expanded=True)
    scores = Scores(scale=None, softcap=softcap)
    output = attend(query, key, value, attn_mask=None, is_causal=True, scores=scores)
    torch.testing.assert_close(
        output, scaled_dot_product_attention(query, key, value, is_causal=True)
    )


def test_half_precision_keeps_its_dtype_and_shape() -> None:
    query, key, value = (tensor.bfloat16() for tensor in tensors(is_expanded=True))
    scores = Scores(scale=None, softcap=2.0)
    output = attend(query, key, value, attn_mask=None, is_causal=True, scores=scores)
    assert output.dtype == torch.bfloat16
    assert output.shape == query.shape


@pytest.fixture
def cudnn_is_enabled() -> Iterator[None]:
    """Enable cuDNN's attention, and restore the process's setting afterwards."""
    before = torch._C._get_cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.usefixtures("cudnn_is_enabled")
def test_on_a_gpu_cudnn_is_disabled_and_the_other_kernels_stay() -> None:
    disable_cudnn_attention(torch.device("cuda", 0))
    assert not torch._C._get_cudnn_sdp_enabled()
    assert torch._C._get_flash_sdp_enabled()
    assert torch._C._get_mem_efficient_sdp_enabled()
    assert torch._C._get_math_sdp_enabled()


@pytest.mark.usefixtures("cudnn_is_enabled")
def test_on_a_cpu_cudnn_stays_enabled() -> None:
    disable_cudnn_attention(torch.device("cpu"))
    assert torch._C._get_cudnn_sdp_enabled()
