"""The base of all JSON bodies: no field is silently ignored.

Each field is honoured, accepted as bookkeeping that no answer depends on, or refused by name. A
field that is null counts as absent. A field of a well-known API that is not honoured is accepted
with a value that asks for nothing, because many clients send such values. So is a field that
clients copy from an answer, if it carries nothing.

A body's JSON schema states the same rules, which pydantic does not derive from the fields. Clients
are generated from that schema, and tests hold the server to it.
"""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar, Final, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from serve_app.api.body.echoed_fields import Nothing, carries_nothing
from serve_app.api.body.unsupported_fields import UNSUPPORTED, Unsupported, unsupported_in

MAX_NAME_LENGTH = 64
"""Characters of an unknown field's name that are compared with known names and echoed."""

NOTHING: Final[Sequence[Any]] = [None, False, 0, "", []]
"""Values that ask for nothing, so they need no other field."""


class StrictBody(BaseModel):
    """A JSON object that refuses unknown fields.

    Attributes:
        unsupported: Fields that are known but not honoured, from the table in `unsupported_fields`.
        echoed: Fields that clients copy from an answer, accepted if they carry nothing.
        echoes_any: Whether a field of any name is accepted if it carries nothing.
        needs: Maps a field to the field that it needs, which must be true or not empty.
        excludes: Maps a field to the field that it excludes; both together are refused.
        one_of: Fields of which a body must hold exactly one; empty sets no rule.
        at_most_one: Fields of which a body may hold only one; empty sets no rule.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="forbid")

    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    echoed: ClassVar[frozenset[str]] = frozenset()
    echoes_any: ClassVar[bool] = False
    needs: ClassVar[Mapping[str, str]] = {}
    excludes: ClassVar[Mapping[str, str]] = {}
    one_of: ClassVar[tuple[str, ...]] = ()
    at_most_one: ClassVar[tuple[str, ...]] = ()

    _attributes: ClassVar[Mapping[str, str]] = {}
    _known_names: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Store the fields' names on the wire, once for each class."""
        super().__pydantic_init_subclass__(**kwargs)
        cls.unsupported = unsupported_in(cls)
        cls._attributes = {field.alias or name: name for name, field in cls.model_fields.items()}
        cls._known_names = frozenset(cls._attributes)

    def wire_value(self, name: str) -> Any:
        """Return a field by its name on the wire."""
        return getattr(self, self._attributes[name])

    @model_validator(mode="before")
    @classmethod
    def _refuse_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.keys() <= cls._known_names:
            return data
        for name, value in data.items():
            if name not in cls._known_names:
                cls._check_unknown(name, value)
        return {name: data[name] for name in data if name in cls._known_names}

    @classmethod
    def _check_unknown(cls, name: str, value: Any) -> None:
        """Refuse a field that this body does not have, unless its value asks for nothing."""
        if name in cls.echoed or cls.echoes_any:
            asks_nothing = carries_nothing(value)
        elif name in cls.unsupported:
            asks_nothing = value is None or _is_one_of(value, cls.unsupported[name].harmless)
        else:
            raise _unknown(name, cls._known_names)
        if not asks_nothing:
            raise PydanticCustomError(
                "unsupported_parameter",
                "{field} is not supported here{why}.",
                {"field": name, "why": cls._reason_against(name)},
            )

    @classmethod
    def _reason_against(cls, name: str) -> str:
        """Return the end of a sentence: why a field is not honoured. Empty without a reason."""
        known = cls.unsupported.get(name) or UNSUPPORTED.get(name)
        return f": {known.why}" if known and known.why else ""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if not (self.needs or self.excludes or self.at_most_one or self.one_of):
            return self  # most objects inside a body have no rules
        for name, condition in self.needs.items():
            if _asks(getattr(self, name)) and not getattr(self, condition):
                raise PydanticCustomError(
                    "invalid_combination",
                    "{field} has no effect without {condition}. Send both, or neither.",
                    {"field": name, "condition": condition},
                )
        for name, other in self.excludes.items():
            if getattr(self, name) and getattr(self, other) is not None:
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "{field} is not supported together with {other}. Leave one of them out.",
                    {"field": name, "other": other},
                )
        given = [name for name in self.at_most_one if self.wire_value(name) is not None]
        if len(given) > 1:
            raise PydanticCustomError(
                "invalid_combination",
                "{field} and {other} can't be combined. Send only one of them.",
                {"field": given[1], "other": given[0]},
            )
        given = [name for name in self.one_of if self.wire_value(name) is not None]
        if self.one_of and len(given) != 1:
            raise PydanticCustomError(
                "invalid_combination",
                "Send exactly one of: {names}.",
                {"field": self.one_of[0], "names": ", ".join(self.one_of)},
            )
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return pydantic's schema with the rules of this class added."""
        schema = handler(core_schema)
        resolved = handler.resolve_ref_schema(schema)
        properties = resolved.setdefault("properties", {})
        for name, field in cls.unsupported.items():
            properties[name] = {
                "enum": [None, *field.harmless],
                "description": f"Not supported{cls._reason_against(name)}. Only values without "
                "effect are accepted.",
            }
        for name in sorted(cls.echoed):
            properties[name] = {
                **handler(Nothing.__pydantic_core_schema__),
                "description": f"Not supported{cls._reason_against(name)}. Accepted if it carries "
                "nothing.",
            }
        if cls.echoes_any:
            resolved["additionalProperties"] = handler(Nothing.__pydantic_core_schema__)
        _add_rules(resolved, cls.needs, cls.excludes, cls.one_of, cls.at_most_one)
        return schema


def _asks(value: Any) -> bool:
    """Return whether a field's value asks for something; see `_asks_nothing`."""
    return any(each for _, each in value) if isinstance(value, StrictBody) else bool(value)


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    # True equals 1 in Python, but not in JSON.
    return any(
        value == choice and isinstance(value, bool) == isinstance(choice, bool)
        for choice in harmless
    )


def _unknown(name: str, known: Collection[str]) -> PydanticCustomError:
    name = name[:MAX_NAME_LENGTH]
    # Only honoured fields: a hint to send what is refused, too, would lead nowhere.
    near = get_close_matches(name, sorted(known), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return PydanticCustomError(
        "unknown_parameter",
        "Unknown parameter: {name}.{hint}",
        {"field": name, "name": repr(name), "hint": hint},
    )


def _add_rules(
    schema: dict[str, Any],
    needs: Mapping[str, str],
    excludes: Mapping[str, str],
    one_of: Sequence[str],
    at_most_one: Sequence[str],
) -> None:
    """Add the rules between fields; see `StrictBody`."""
    rules = [_needs_rule(name, condition) for name, condition in needs.items()]
    rules += [_excludes_rule(name, other) for name, other in excludes.items()]
    if one_of:
        rules.append({"oneOf": [_only_rule(name, one_of) for name in one_of]})
    if at_most_one:
        rules.append({"anyOf": [_no_other_rule(name, at_most_one) for name in at_most_one]})
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
    nothing = {"enum": list(NOTHING)}
    object_of_nothing = {"type": "object", "additionalProperties": nothing}
    return {"properties": {name: {"anyOf": [nothing, object_of_nothing]}}}


def _only_rule(name: str, names: Sequence[str]) -> dict[str, Any]:
    others = _no_other_rule(name, names)["properties"]
    return {
        "properties": {name: {"not": {"type": "null"}}, **others},
        "required": [name],
    }


def _no_other_rule(name: str, names: Sequence[str]) -> dict[str, Any]:
    return {"properties": {other: {"type": "null"} for other in names if other != name}}
