from types import SimpleNamespace
from typing import cast

import pytest
import torch

from deployments.engine.attention_call import (
    FEATURES,
    INERT_ARGUMENTS,
    UnsupportedAttentionError,
    check_arguments,
    check_heads,
    check_window,
)
from deployments.engine.kv_slots import KVShape

SHAPE = KVShape((None, None), 2, 8, torch.float32)


def layer(*, is_causal: bool = True) -> torch.nn.Module:
    return cast("torch.nn.Module", SimpleNamespace(is_causal=is_causal))


@pytest.mark.parametrize("name", ["position_bias", "s_aux", "something_new"])
def test_an_argument_that_is_not_known_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedAttentionError, match=name) as caught:
        check_arguments(layer(), None, {name: 30.0})
    assert FEATURES.get(name, "") in str(caught.value)
    check_arguments(layer(), None, {name: None})


def test_arguments_that_change_nothing_are_let_through() -> None:
    check_arguments(layer(), None, dict.fromkeys(INERT_ARGUMENTS, 0))


def test_a_mask_of_the_models_own_is_refused() -> None:
    with pytest.raises(UnsupportedAttentionError, match="mask"):
        check_arguments(layer(), torch.ones(1), {})


@pytest.mark.parametrize("of_the_module", [True, False])
@pytest.mark.parametrize("argument", [True, False, None])
def test_looking_ahead_is_refused_and_the_argument_outweighs_the_module(
    of_the_module: bool, argument: bool | None
) -> None:
    module, others = layer(is_causal=of_the_module), {"is_causal": argument}
    if of_the_module if argument is None else argument:
        check_arguments(module, None, others)
    else:
        with pytest.raises(UnsupportedAttentionError, match="look ahead"):
            check_arguments(module, None, others)


def test_values_of_another_size_than_the_slots_are_refused() -> None:
    right, wide = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 16)
    check_heads(SHAPE, right, right)
    with pytest.raises(UnsupportedAttentionError, match="values have 2 heads of 16 elements"):
        check_heads(SHAPE, right, wide)


@pytest.mark.parametrize(
    ("asked", "capacity", "max_model_len"), [(None, 96, 96), (7, 7, 96), (8, 7, 7), (None, 7, 7)]
)
def test_a_window_as_long_as_a_slot_need_not_be_told(
    asked: int | None, capacity: int, max_model_len: int
) -> None:
    check_window(asked, capacity, max_model_len, 0)


@pytest.mark.parametrize(("asked", "seen"), [(None, 8), (9, 8), (8, 8), (6, 6)])
def test_a_window_that_the_slots_were_not_made_for_is_refused(asked: int | None, seen: int) -> None:
    with pytest.raises(UnsupportedAttentionError, match=rf"layer 1 attends to {seen} .* is 7$"):
        check_window(asked, 7, 8, 1)
