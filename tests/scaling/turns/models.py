"""The models that take turns, and what they are asked."""

from collections.abc import Mapping
from typing import Any

from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.sizes import DETECTOR, MODEL_SECTION

FIRST = MODEL_SECTION
SECOND = "pydoc-second"
DAMAGED = DETECTOR
"""Here it generates. Serve gives it up at its first failed start (`tests.faults.served.build`)."""

SMALL = "pydoc-small"
"""Has room beside the first model, where processes end."""

SEARCH = "pydoc-search"
"""Embeds texts, where models sleep lightly."""

EMBEDDED = {
    "model": SEARCH,
    "input": ["join two paths", "start a thread " * 20, "x"],
    "encoding_format": "base64",
}

MODELS = (FIRST, SECOND, DAMAGED)

NUM_TOKENS = 800
NAMES = ("os.path.join", "os.path.split", "os.stat", "os.walk")
BODIES = [about(name, NUM_TOKENS, **SEEDED | {"seed": i}) for i, name in enumerate(NAMES)]
"""Long questions for the first model; the answers do not end before its turn does."""


def quick(model: str) -> Mapping[str, Any]:
    """Return a question with a short answer."""
    return about("os.stat", max_tokens=5) | {"model": model}
