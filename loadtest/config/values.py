"""Configuration values as people write them: lists like `1,2,4`, durations like `60s`."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

_SECONDS_OF: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_WHOLE: Final = re.compile(rf"(?:{_PART.pattern})+")


def seconds_of(value: Any) -> Any:
    """Convert a duration to seconds; pydantic checks any value that is not a text.

    Raises:
        ValueError: The text is not a duration.
    """
    if not isinstance(value, str):
        return value
    text = value.replace(" ", "")
    if _WHOLE.fullmatch(text):
        return sum(float(number) * _SECONDS_OF[unit] for number, unit in _PART.findall(text))
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{value!r} is not a duration such as 60s, 2m, 500ms or 1h30m") from None


def _listed(value: Any) -> Any:
    """Split `1,2,4`; wrap a single value in a list."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value if isinstance(value, list | tuple) or value is None else [value]


def _one_or_more(value: Any) -> Any:
    """Wrap a single text in a list, or list a mapping's pairs; don't split at commas."""
    if isinstance(value, Mapping):
        return [f"{name}: {each}" for name, each in value.items()]
    return [value] if isinstance(value, str) else value


PositiveSeconds = Annotated[float, BeforeValidator(seconds_of), Field(gt=0, allow_inf_nan=False)]
"""A duration that must not be 0."""

Seconds = Annotated[float, BeforeValidator(seconds_of), Field(ge=0, allow_inf_nan=False)]
"""A duration that may be 0."""

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Counts = Annotated[tuple[Positive, ...], BeforeValidator(_listed)]
Rates = Annotated[
    tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], BeforeValidator(_listed)
]
Texts = Annotated[tuple[str, ...], BeforeValidator(_one_or_more)]
