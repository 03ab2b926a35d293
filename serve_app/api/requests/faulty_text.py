"""Tells which of a request's texts a replica's error is about.

A replica knows the texts only as a list, which it calls `input`; a surface has names of its own.
"""

import re
from typing import Final

from deployments.contract.errors import ContextLengthExceededError, RaystreamError

ALL_TEXTS: Final = "input"
"""What an error names that is about all texts together."""

TRUNCATE_ADVICE: Final = ' Send "truncate": true to drop its end.'


def faulty_text(error: RaystreamError) -> int | None:
    """Return the place of the text that an error is about, from 0; None if it is about none."""
    named = re.fullmatch(r"input\[(\d+)\]", error.param or "")
    return None if named is None else int(named[1])


def renamed(error: RaystreamError, param: str, advice: str = TRUNCATE_ADVICE) -> RaystreamError:
    """Return an error about a text under the client's name of it.

    Args:
        error: The replica's error.
        param: The client's name.
        advice: What to do about a text that is too long.
    """
    message = error.message
    if isinstance(error, ContextLengthExceededError):
        message += advice
    return type(error)(message, param)
