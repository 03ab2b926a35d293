"""The signature of a block of reasoning, which clients send back with the block.

Reasoning is not signed here. But where a client wants it omitted, the signature carries it, so that
the model sees it again in the next turn, as at Anthropic.
"""

from base64 import b64decode, b64encode
from typing import Final

UNSIGNED: Final = "unsigned"
"""Some clients send reasoning back only if it has a signature."""

_CARRYING: Final = "omitted:"


def carrying(reasoning: str) -> str:
    """Return a signature that carries reasoning."""
    return _CARRYING + b64encode(reasoning.encode()).decode()


def carried(signature: str | None) -> str:
    """Return the reasoning that a signature carries; nothing for one of another server."""
    if signature is None or not signature.startswith(_CARRYING):
        return ""
    try:
        return b64decode(signature.removeprefix(_CARRYING), validate=True).decode()
    except ValueError:
        return ""
