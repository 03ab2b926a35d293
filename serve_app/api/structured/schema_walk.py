"""Which values within a JSON schema are schemas themselves, and not names or data.

Source: https://json-schema.org/draft/2020-12/json-schema-core#section-10
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

Schema = Mapping[str, Any]

BY_NAME: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keywords whose value maps names to schemas."""

IN_A_LIST: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
"""Keywords whose value is a list of schemas."""

ALONE: Final = frozenset(
    {
        "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if",
        "items", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
"""Keywords whose value is a schema; that of `items` may also be a list of schemas."""


def subschemas(keyword: str, value: object) -> Iterator[Schema]:
    """Yield the schemas that a keyword's value holds; booleans are left out."""
    yield from (each for _, each in steps(keyword, value))


def steps(keyword: str, value: object) -> Iterator[tuple[str, Schema]]:
    """Yield the same schemas, each with the steps of a JSON pointer that lead to it."""
    found: list[tuple[str, object]] = []
    if keyword in BY_NAME and isinstance(value, Mapping):
        escaped = (
            (quote(name.replace("~", "~0").replace("/", "~1")), value[name]) for name in value
        )
        found = [(f"{keyword}/{name}", each) for name, each in escaped]
    elif keyword in IN_A_LIST | ALONE and isinstance(value, list):
        found = [(f"{keyword}/{at}", each) for at, each in enumerate(value)]
    elif keyword in ALONE:
        found = [(keyword, value)]
    yield from ((step, each) for step, each in found if isinstance(each, Mapping))


def rebuilt(
    schema: Schema, change: Callable[[Schema, dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Return a copy in which each schema, the innermost first, is what `change` makes of it.

    Args:
        schema: Not nested deeper than Python's stack.
        change: Takes a schema as it was and its copy, and returns the copy's replacement.
    """

    def again(value: object) -> object:
        return rebuilt(value, change) if isinstance(value, Mapping) else value

    made: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in BY_NAME and isinstance(value, Mapping):
            made[keyword] = {name: again(each) for name, each in value.items()}
        elif keyword in IN_A_LIST | ALONE and isinstance(value, list):
            made[keyword] = [again(each) for each in value]
        else:
            made[keyword] = again(value) if keyword in ALONE else value
    return change(schema, made)
