"""Durations as people write them: 60s, 2m, 500ms, 1h30m; a bare number is seconds."""

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

_SECONDS_OF: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_WHOLE: Final = re.compile(rf"(?:{_PART.pattern})+")


def seconds_of(value: Any) -> Any:
    """Return a duration's seconds; what is no text is left to pydantic.

    Raises:
        ValueError: The text is no duration.
    """
    if not isinstance(value, str):
        return value
    text = value.replace(" ", "")
    if _WHOLE.fullmatch(text):
        return sum(float(number) * _SECONDS_OF[unit] for number, unit in _PART.findall(text))
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{value!r} is no duration such as 60s, 2m, 500ms or 1h30m") from None


PositiveSeconds = Annotated[float, BeforeValidator(seconds_of), Field(gt=0, allow_inf_nan=False)]
"""Of a configuration, where nothing would be left of 0."""

Seconds = Annotated[float, BeforeValidator(seconds_of), Field(ge=0, allow_inf_nan=False)]
"""Of a configuration."""
