"""What /openapi.json says of a body beyond what pydantic says of its fields.

Clients are made from it and it is tested against the server, so it tells the rules of `StrictBody`
as they are held: which fields are known but not honoured, and which stand only with another.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from serve_app.api.refusals import reason_against

NOTHING: Final[Sequence[Any]] = [None, False, 0, "", []]
"""What asks for nothing, and so needs nothing beside it."""


def tell_unsupported(schema: dict[str, Any], unsupported: Mapping[str, Sequence[Any]]) -> None:
    """Add the fields that are known but not honoured, with the values that ask for nothing."""
    properties = schema.setdefault("properties", {})
    for name, harmless in unsupported.items():
        properties[name] = {
            "enum": [None, *harmless],
            "description": f"Not supported{reason_against(name)}; this asks for nothing.",
        }


def tell_rules(
    schema: dict[str, Any],
    needs: Mapping[str, str],
    excludes: Mapping[str, str],
    one_of: Sequence[str],
) -> None:
    """Add what holds between the fields; see `StrictBody`."""
    rules = [_needs_rule(name, condition) for name, condition in needs.items()]
    rules += [_excludes_rule(name, other) for name, other in excludes.items()]
    if one_of:
        rules.append({"oneOf": [_only_rule(name, one_of) for name in one_of]})
    if rules:
        schema["allOf"] = [*schema.get("allOf", []), *rules]


def _needs_rule(name: str, condition: str) -> dict[str, Any]:
    is_met = {
        "properties": {condition: {"not": {"enum": list(NOTHING)}}},
        "required": [condition],
    }
    return {"anyOf": [_asks_nothing(name), is_met]}


def _excludes_rule(name: str, other: str) -> dict[str, Any]:
    return {"anyOf": [_asks_nothing(name), {"properties": {other: {"type": "null"}}}]}


def _asks_nothing(name: str) -> dict[str, Any]:
    return {"properties": {name: {"enum": list(NOTHING)}}}


def _only_rule(name: str, names: Sequence[str]) -> dict[str, Any]:
    others = {other: {"type": "null"} for other in names if other != name}
    return {
        "properties": {name: {"not": {"type": "null"}}, **others},
        "required": [name],
    }
