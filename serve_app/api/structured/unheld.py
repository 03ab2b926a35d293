"""Says in a client's words what a grammar leaves out of its JSON schemas."""

import json
import re
from collections.abc import Iterable
from typing import Final

MAX_NAME_LENGTH: Final = 64

_FORMAT: Final = re.compile(r"Unknown format: (?P<name>.*)", re.DOTALL)
_KEYWORDS: Final = re.compile(r"Unimplemented keys: (?P<names>\[.*\])", re.DOTALL)
_ONE_OF: Final = "oneOf not fully supported"
_SIZES: Final = "min/maxProperties only supported"


def describe(unheld: Iterable[str]) -> tuple[str, ...]:
    """Return the warning for a client; nothing if nothing is left out.

    Args:
        unheld: llguidance's warnings, or what `SchemaHolder` names.
    """
    named = sorted({name for warning in unheld for name in _names(warning)})
    if not named:
        return ()
    return (f"Not enforced in JSON schemas: {', '.join(named)}",)


def _names(warning: str) -> list[str]:
    if found := _FORMAT.fullmatch(warning):
        return [f"format {found['name'][:MAX_NAME_LENGTH]}"]
    if found := _KEYWORDS.fullmatch(warning):
        names: list[str] = json.loads(found["names"])
        return [name[:MAX_NAME_LENGTH] for name in names]
    if warning.startswith(_ONE_OF):
        return ["oneOf (read as anyOf)"]
    if warning.startswith(_SIZES):
        return ["minProperties and maxProperties"]
    return [warning[:MAX_NAME_LENGTH]]
