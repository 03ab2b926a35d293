"""`make table`: writes the table of docs/models.md from the families in the tests.

The features of a family are read off its tiny model, so the table claims only what the tests run. A
test fails if the document differs.
"""

from collections.abc import Callable, Mapping
from textwrap import fill
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from deployments.engine.model.support import has_images
from tests.engine.scenarios import SCENARIOS
from tests.engine.tiny_models import FAMILIES, Family
from tests.made_table import MadeTable

WIDTH = 100

HEADER = "| models | for example | what is tested with them | images |\n| --- | --- | --- | --- |\n"


def table() -> str:
    """Return the table in Markdown, followed by the scenarios that each line is tested under."""
    rows = "".join(_row(family) for family in FAMILIES)
    promise = (
        "Each of these models gives the tokens of `model.generate` (float32, greedy), whatever "
        f"happens around a sequence: {', '.join(SCENARIOS)}."
    )
    return f"\n{HEADER}{rows}\n{fill(promise, WIDTH)}\n\n"


def _row(family: Family) -> str:
    model = family.make()
    images = "yes" if has_images(model.config) else "no"
    features = ", ".join(features_of(model))
    return f"| {family.name} | {family.example} | {features} | {images} |\n"


def features_of(model: PreTrainedModel) -> list[str]:
    """Name the features of attention and positions that a model needs."""
    text = model.config.get_text_config()
    found = [name for name, has in FEATURES.items() if has(text)]
    parts = {part for name, _ in model.named_parameters() for part in name.split(".")}
    return found + [feature for name, feature in FEATURES_BY_WEIGHT.items() if name in parts]


def _groups(text: PreTrainedConfig) -> int:
    num_kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    groups: int = text.num_attention_heads // num_kv_heads
    return groups


def _windows(text: PreTrainedConfig) -> set[object]:
    return {options.get("sliding_window") for options in get_layer_types_and_kwargs(text)[1]}


def _rope_type(text: PreTrainedConfig) -> str | None:
    rope_type: str | None = _rope(text).get("rope_type")
    return rope_type


def _rope(text: PreTrainedConfig) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    return found


FEATURES: Mapping[str, Callable[[PreTrainedConfig], bool]] = {
    "keys for every head": lambda text: _groups(text) == 1,
    "grouped queries": lambda text: 1 < _groups(text) < text.num_attention_heads,
    "one head of keys": lambda text: _groups(text) == text.num_attention_heads,
    "sliding window": lambda text: None not in _windows(text),
    "sliding window in some layers": lambda text: len(_windows(text)) > 1,
    "softcapped scores": lambda text: bool(getattr(text, "attn_logit_softcapping", None)),
    "scaled rotary positions": lambda text: _rope_type(text) in {"llama3", "yarn"},
    "rotary positions on three axes": lambda text: "mrope_section" in _rope(text),
    "learned positions": lambda text: not getattr(text, "rope_parameters", None),
}

FEATURES_BY_WEIGHT = {
    "q_norm": "norms on queries and keys",
    "sinks": "attention sinks",
    "experts": "experts",
}
"""By a part of a weight's name."""


TABLE = MadeTable("docs/models.md", "models", table)

if __name__ == "__main__":
    TABLE.write()
