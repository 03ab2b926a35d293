"""Sections of the configuration file: strict pydantic models."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


def unknown_key_message(
    key: str, known: list[str], refused: Mapping[str, str] | None = None
) -> str:
    """Return a message with the unknown key and the nearest known key, or all of them.

    Args:
        key: The key.
        known: The keys of the section.
        refused: Why keys of another program are not among them.
    """
    if refused and key in refused:
        return f"{key!r} can't be set here: {refused[key]}"
    near = get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key {key!r}: {hint}"


class StrictModel(BaseModel):
    """A section of the configuration; unknown keys are errors with a hint."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )
    refused_keys: ClassVar[Mapping[str, str]] = {}
    """Why keys of another program, whose names a section has, are not among its own."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = list(cls.model_fields)
            unknown = [str(key) for key in data if key not in known]
            if unknown:
                raise ValueError(
                    "; ".join(unknown_key_message(key, known, cls.refused_keys) for key in unknown)
                )
        return data
