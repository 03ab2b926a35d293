"""What every JSON body has in common: nothing in it is ignored in silence.

A field is honoured, or it is bookkeeping that changes no answer, or it is refused by its name. A
field that is null counts as not given. A field of a well-known API that is not honoured may be sent
with the value that asks for nothing, because many clients do so.

Each body tells the same of itself as a JSON schema: see `body_json_schema`.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from serve_app.api.body_json_schema import tell_rules, tell_unsupported
from serve_app.api.refusals import reason_against

MAX_NAME_LENGTH = 64
"""Of an unknown field's name, what is looked at and repeated."""


class StrictBody(BaseModel):
    """A JSON object whose every field is known.

    Attributes:
        unsupported: Fields that are known but not honoured, each with the values that ask for
            nothing. `refusals` knows the reasons.
        needs: Fields that mean nothing unless another one, the value, is true or not empty.
        excludes: Fields that are not honoured where another one, the value, is given.
        one_of: Fields of which a body holds exactly one, if any are named here.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="forbid")

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    needs: ClassVar[Mapping[str, str]] = {}
    excludes: ClassVar[Mapping[str, str]] = {}
    one_of: ClassVar[tuple[str, ...]] = ()

    _known_names: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Note the fields' names on the wire, once for all bodies."""
        super().__pydantic_init_subclass__(**kwargs)
        cls._known_names = frozenset(
            field.alias or name for name, field in cls.model_fields.items()
        )

    @model_validator(mode="before")
    @classmethod
    def _refuse_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.keys() <= cls._known_names:
            return data
        for name, value in data.items():
            if name not in cls._known_names:
                cls._check_stranger(name, value)
        return {name: data[name] for name in data if name in cls._known_names}

    @classmethod
    def _check_stranger(cls, name: str, value: Any) -> None:
        """Refuse a field that is none of ours, unless it asks for nothing."""
        if name not in cls.unsupported:
            raise _unknown(name, [*sorted(cls._known_names), *cls.unsupported])
        if value is not None and not _is_one_of(value, cls.unsupported[name]):
            raise PydanticCustomError(
                "unsupported_parameter",
                "{field} is not supported here{why}.",
                {"field": name, "why": reason_against(name)},
            )

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for name, condition in self.needs.items():
            if getattr(self, name) and not getattr(self, condition):
                raise PydanticCustomError(
                    "invalid_combination",
                    "{field} means nothing without {condition}.",
                    {"field": name, "condition": condition},
                )
        for name, other in self.excludes.items():
            if getattr(self, name) and getattr(self, other) is not None:
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "{field} is not supported together with {other}. Leave one of them out.",
                    {"field": name, "other": other},
                )
        given = [name for name in self.one_of if getattr(self, name) is not None]
        if self.one_of and len(given) != 1:
            raise PydanticCustomError(
                "invalid_combination",
                "Send either {names}.",
                {"field": self.one_of[0], "names": " or ".join(self.one_of)},
            )
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema of what validates: pydantic's, and the rules above."""
        schema = handler(core_schema)
        told = handler.resolve_ref_schema(schema)
        tell_unsupported(told, cls.unsupported)
        tell_rules(told, cls.needs, cls.excludes, cls.one_of)
        return schema


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    # Python holds True and 1 to be equal; JSON does not.
    return any(
        value == choice and isinstance(value, bool) == isinstance(choice, bool)
        for choice in harmless
    )


def _unknown(name: str, known: list[str]) -> PydanticCustomError:
    name = name[:MAX_NAME_LENGTH]
    near = get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return PydanticCustomError(
        "unknown_parameter",
        "Unknown parameter: {name}.{hint}",
        {"field": name, "name": repr(name), "hint": hint},
    )
