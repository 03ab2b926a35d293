"""What every JSON body has in common: nothing in it is ignored in silence.

A field is honoured, or it is bookkeeping that changes no answer, or it is refused by its name. A
field that is null counts as not given. A field of a well-known API that is not honoured may be sent
with the value that asks for nothing, because many clients do so.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

MAX_NAME_LENGTH = 64
"""Of an unknown field's name, what is looked at and repeated."""


class StrictBody(BaseModel):
    """A JSON object whose every field is known.

    Attributes:
        unsupported: Fields that are known but not honoured, each with the values that ask for
            nothing.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="forbid")

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, value in data.items():
            cls._check_field(name, value)
        known = cls._known_names()
        return {name: data[name] for name in data if name in known}

    @classmethod
    def _known_names(cls) -> list[str]:
        """Return the fields' names on the wire."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @classmethod
    def _check_field(cls, name: str, value: Any) -> None:
        known = cls._known_names()
        if name in known:
            return
        if name not in cls.unsupported:
            raise _unknown(name, [*known, *cls.unsupported])
        if value is not None and not _is_one_of(value, cls.unsupported[name]):
            raise PydanticCustomError(
                "unsupported_parameter", "{field} is not supported here.", {"field": name}
            )


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
