"""Sections of the configuration file: strict pydantic models."""

from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


def unknown_key_message(key: str, known: list[str]) -> str:
    """Return a message with the unknown key and the nearest known key, or all of them."""
    near = get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key {key!r}: {hint}"


class StrictModel(BaseModel):
    """A section of the configuration; unknown keys are errors with a hint."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = list(cls.model_fields)
            unknown = [str(key) for key in data if key not in known]
            if unknown:
                raise ValueError("; ".join(unknown_key_message(key, known) for key in unknown))
        return data
