from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from deployments.compute.attention_arguments import UnsupportedAttentionError
from deployments.pooling.packed_attention import PackedRow, packed_attention

LENGTHS = (3, 1, 9, 4)
HEADS, DIM = 4, 8


def module(is_causal: bool) -> Any:
    return SimpleNamespace(is_causal=is_causal)


def random_heads(num_heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_heads)
    row = torch.randn(1, sum(LENGTHS), num_heads * DIM, generator=generator).to(dtype)
    return row.view(1, -1, num_heads, DIM).transpose(1, 2)


def run(
    is_causal: bool, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> torch.Tensor:
    options = {"packed_row": PackedRow(LENGTHS), **options}
    found, _ = packed_attention(module(is_causal), query, key, value, None, **options)
    return found


def expected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, window: int | None
) -> torch.Tensor:
    """Attend with one mask for the whole row."""
    number = torch.repeat_interleave(torch.tensor(LENGTHS))
    position = torch.cat([torch.arange(n) for n in LENGTHS])
    distance = position[:, None] - position
    mask = number[:, None] == number
    if is_causal:
        mask &= distance >= 0
    if window is not None:
        mask &= distance.abs() < window
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


@pytest.mark.parametrize("num_kv_heads", [HEADS, 2, 1])
def test_each_sequence_attends_only_to_itself(num_kv_heads: int) -> None:
    query, key, value = random_heads(HEADS), random_heads(num_kv_heads), random_heads(num_kv_heads)
    for is_causal, window in product((True, False), (None, 1, 3, 8, 9, 100)):
        found = run(is_causal, query, key, value, sliding_window=window)
        torch.testing.assert_close(found, expected(query, key, value, is_causal, window))


@pytest.mark.parametrize("scaling", [None, 0.1])
def test_products_in_bfloat16_are_near_those_in_float32(scaling: float | None) -> None:
    query, key, value = (random_heads(HEADS, torch.bfloat16) for _ in range(3))
    exact = run(False, query.float(), key.float(), value.float(), scaling=scaling)
    found = run(False, query, key, value, scaling=scaling)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), exact, atol=0.03, rtol=0)


def test_scores_are_bounded_if_the_model_has_a_softcap() -> None:
    query, key, value = (random_heads(HEADS) for _ in range(3))
    plain, bounded, loosely = (
        run(False, query, key, value, softcap=cap) for cap in (None, 0.5, 1e6)
    )
    assert not torch.allclose(plain, bounded, atol=1e-3)
    torch.testing.assert_close(plain, loosely, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["s_aux", "position_bias", "something_new"])
def test_unknown_arguments_are_refused_by_name(name: str) -> None:
    heads = random_heads(HEADS)
    with pytest.raises(UnsupportedAttentionError, match=name):
        run(False, heads, heads, heads, **{name: 1})
    run(False, heads, heads, heads, **{name: None})


def test_a_missing_packed_row_or_a_mask_is_refused() -> None:
    heads = random_heads(HEADS)
    with pytest.raises(UnsupportedAttentionError):
        run(False, heads, heads, heads, packed_row=None)
    row = PackedRow(LENGTHS)
    with pytest.raises(UnsupportedAttentionError):
        packed_attention(module(False), heads, heads, heads, torch.ones(1), packed_row=row)
