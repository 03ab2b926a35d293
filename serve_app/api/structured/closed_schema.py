"""Closes the objects of a schema that list properties, as `additionalProperties: false` would.

By the standard, such objects may have any further property, so a model that follows the grammar may
go on writing properties that the schema does not list. Authors of schemas hardly ever mean that.

A schema that some JSON satisfies stays satisfiable. So an object stays open if it says itself what
else it may have, or if another schema constrains the same value: in `allOf`, in `anyOf` beside
`properties`, in `$ref` beside them, and so on. Closing one of two schemas would forbid what the
other asks for.

Source: https://json-schema.org/draft/2020-12/json-schema-core#section-10.3.2
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from serve_app.api.structured.schema_walk import Schema, rebuilt, subschemas

# Schemas under these keywords constrain the very value that their parent constrains.
_SAME_VALUE: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_CONDITIONS: Final = frozenset(
    {"if", "then", "else", "not", "dependentSchemas", "dependencies", "propertyNames", "contains"}
)
_OTHER_CONDITIONS: Final = frozenset(
    {"const", "enum", "dependentRequired", "$dynamicRef", "$recursiveRef"}
)
_OF_CONTENTS: Final = frozenset(
    {"properties", "patternProperties", "additionalProperties", "required", "minProperties",
     "maxProperties", "unevaluatedProperties", "items", "prefixItems", "additionalItems",
     "unevaluatedItems"}
)  # fmt: skip
_SAYS_ITSELF: Final = frozenset({"additionalProperties"})
_NAMES: Final = frozenset({"$anchor", "$dynamicAnchor", "$recursiveAnchor", "id", "$id"})
"""Keywords by which a reference may find a schema other than by its place."""


def closed(schema: Schema) -> dict[str, Any]:
    """Return the schema with its objects closed; see the module."""
    found = _Constraints(schema)

    def change(was: Schema, made: dict[str, Any]) -> dict[str, Any]:
        return _closed(made) if found.is_only_one(was) else made

    return rebuilt(schema, change)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an object's schema closed, if it lists properties and nothing speaks against it."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not _may_close(schema, len(properties)):
        return schema
    schema.pop("unevaluatedProperties", None)
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    # What is required may be absent from the list; it then may be anything.
    others = {name: True for name in names if isinstance(name, str) and name not in properties}
    schema["properties"] = {**properties, **others}
    schema["additionalProperties"] = False
    return schema


def _may_close(schema: Schema, num_properties: int) -> bool:
    if schema.keys() & (_SAYS_ITSELF | _SAME_VALUE | _CONDITIONS | _OTHER_CONDITIONS):
        return False
    at_least = schema.get("minProperties", 0)
    is_enough = isinstance(at_least, int | float) and at_least <= num_properties
    return is_enough and schema.get("unevaluatedProperties", False) is False


class _Constraints:
    """Knows of each schema whether no other one constrains the same values."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._alone: set[int] = set()
        self._together: set[int] = set()
        self._has_unknown_refs = False
        self._visit_all()

    def is_only_one(self, schema: Schema) -> bool:
        """Return whether a schema is used, and nowhere together with another one."""
        return (
            not self._has_unknown_refs
            and id(schema) in self._alone
            and id(schema) not in self._together
        )

    def _visit_all(self) -> None:
        # Not by recursion: references may lead round in circles.
        waiting = [(self._root, True)]
        while waiting:
            schema, is_alone = waiting.pop()
            seen = self._alone if is_alone else self._together
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            self._has_unknown_refs |= schema is not self._root and bool(schema.keys() & _NAMES)
            waiting += [(child, is_alone and stays) for child, stays in self._children(schema)]

    def _children(self, schema: Schema) -> Iterator[tuple[Schema, bool]]:
        """Yield the schemas within one or referred to, and whether each alone decides there."""
        num_constraints = _num_constraints(schema)
        has_others = bool(schema.keys() & (_SAME_VALUE | _CONDITIONS | _OTHER_CONDITIONS))
        overlaps = "patternProperties" in schema and "properties" in schema
        for keyword, value in schema.items():
            if keyword in ("$defs", "definitions"):
                continue
            if keyword == "$ref":
                yield from ((found, num_constraints == 1) for found in self._referred(value))
                continue
            if keyword in _SAME_VALUE:
                stays = num_constraints == 1
            elif keyword in ("properties", "patternProperties"):
                stays = not (overlaps or has_others)
            else:
                stays = not has_others
            yield from ((each, stays) for each in subschemas(keyword, value))

    def _referred(self, reference: object) -> Iterator[Schema]:
        found = _resolved(self._root, reference)
        if found is None:
            self._has_unknown_refs = True
        else:
            yield found


def _num_constraints(schema: Schema) -> int:
    """Return how many parts of a schema constrain its value, each schema of `allOf` as one."""
    num_own = int(bool(schema.keys() & (_OF_CONTENTS | _CONDITIONS | _OTHER_CONDITIONS)))
    several = schema.get("allOf")
    num_several = len(several) if isinstance(several, list) else 0
    return num_own + num_several + len(schema.keys() & (_SAME_VALUE - {"allOf"}))


def _resolved(root: Schema, reference: object) -> Schema | None:
    """Return the schema at a reference of the form `#/a/b`; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return None
    is_pointer = reference == "#" or reference.startswith("#/")
    return found if is_pointer and isinstance(found, Mapping) else None
