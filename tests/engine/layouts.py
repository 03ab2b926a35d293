"""Families that stand for those whose KV memory is laid out alike.

What holds a sequence's tokens depends on the windows of a model's layers only. A test of that runs
on one family for each layout; on the others it is a soak.
"""

from collections.abc import Collection
from typing import Final

import pytest

from tests.engine.tiny_models import MODELS

LAYOUTS: Final = ("qwen2", "mistral", "gemma3_text")
"""Families whose layers see all tokens, only a window, and some of them only a window."""


def soak_unless(name: str, chosen: Collection[str]) -> Collection[pytest.MarkDecorator]:
    """Return the marks of a family's case in a test that is a soak except on chosen families."""
    return () if name in chosen else (pytest.mark.soak,)


for_each_layout = pytest.mark.parametrize(
    "make_model",
    [
        pytest.param(make_model, id=name, marks=soak_unless(name, LAYOUTS))
        for name, make_model in MODELS.items()
    ],
)

for_each_captured_layout = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=soak_unless(name, (*LAYOUTS, "gemma2", "gpt2"))) for name in MODELS],
)
"""Also families with softcapped scores, and with a forward pass that can't be captured."""
