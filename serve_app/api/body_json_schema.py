"""What /openapi.json says of a body beyond what pydantic says of its fields.

Clients are made from it and it is tested against the server, so it tells the rules of `StrictBody`
as they are held: which fields are known but not honoured, and which stand only with another.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from serve_app.api.refusals import reason_against

NOTHING: Final[Sequence[Any]] = [None, False, 0, "", []]
"""What asks for nothing, and so needs nothing beside it."""


def tell_rules(
    schema: dict[str, Any],
    unsupported: Mapping[str, Sequence[Any]],
    needs: Mapping[str, str],
    one_of: Sequence[str],
) -> None:
    """Add to a body's schema what `StrictBody` holds it to."""
    properties = schema.setdefault("properties", {})
    for name, harmless in unsupported.items():
        properties[name] = {
            "enum": [None, *harmless],
            "description": f"Not supported{reason_against(name)}; this asks for nothing.",
        }
    rules = [_needs_rule(name, condition) for name, condition in needs.items()]
    if one_of:
        rules.append({"oneOf": [_only_rule(name, one_of) for name in one_of]})
    if rules:
        schema["allOf"] = rules


def _needs_rule(name: str, condition: str) -> dict[str, Any]:
    asks_nothing = {"properties": {name: {"enum": list(NOTHING)}}}
    is_met = {"properties": {condition: {"const": True}}, "required": [condition]}
    return {"anyOf": [asks_nothing, is_met]}


def _only_rule(name: str, names: Sequence[str]) -> dict[str, Any]:
    others = {other: {"type": "null"} for other in names if other != name}
    return {
        "properties": {name: {"not": {"type": "null"}}, **others},
        "required": [name],
    }
