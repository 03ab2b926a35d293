from types import SimpleNamespace
from typing import cast

import pytest
import torch

from deployments.compute.attention_arguments import (
    FEATURES,
    INERT_ARGUMENTS,
    UnsupportedAttentionError,
    check_arguments,
)


def layer(*, is_causal: bool = True) -> torch.nn.Module:
    return cast("torch.nn.Module", SimpleNamespace(is_causal=is_causal))


@pytest.mark.parametrize("name", ["position_bias", "s_aux", "something_new"])
def test_an_unknown_argument_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedAttentionError, match=name) as caught:
        check_arguments(layer(), None, {name: 30.0})
    assert FEATURES.get(name, "") in str(caught.value)
    check_arguments(layer(), None, {name: None})


def test_arguments_without_effect_are_allowed() -> None:
    check_arguments(layer(), None, dict.fromkeys(INERT_ARGUMENTS, 0))


def test_a_mask_of_the_models_own_is_refused() -> None:
    with pytest.raises(UnsupportedAttentionError, match="mask"):
        check_arguments(layer(), torch.ones(1), {})


@pytest.mark.parametrize("of_the_module", [True, False])
@pytest.mark.parametrize("argument", [True, False, None])
def test_looking_ahead_is_refused_and_the_argument_overrides_the_module(
    of_the_module: bool, argument: bool | None
) -> None:
    module, others = layer(is_causal=of_the_module), {"is_causal": argument}
    if of_the_module if argument is None else argument:
        check_arguments(module, None, others)
    else:
        with pytest.raises(UnsupportedAttentionError, match="look ahead"):
            check_arguments(module, None, others)
