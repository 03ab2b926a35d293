"""Families that stand for those whose KV memory is laid out alike.

What holds a sequence's tokens depends on the windows of a model's layers only. A test of that runs
on one family for each layout; on the others it is a soak.
"""

from typing import Final

import pytest

from tests.engine.tiny_models import MODELS

LAYOUTS: Final = ("qwen2", "mistral", "gemma3_text")
"""Families whose layers see all tokens, only a window, and some of them only a window."""

for_each_layout = pytest.mark.parametrize(
    "make_model",
    [
        pytest.param(make_model, id=name, marks=() if name in LAYOUTS else pytest.mark.soak)
        for name, make_model in MODELS.items()
    ],
)
