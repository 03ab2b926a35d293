"""Notices: what a client may like to know while its stream is silent.

They are sent as comments between the events of a stream, which clients skip.
"""

from enum import StrEnum
from typing import Final

NOTICE_INTERVAL_S: Final = 2.0
"""Seconds between two notices to a client whose stream waits."""


class Notice(StrEnum):
    """A notice; its value is the comment's text."""

    MOVED = "moved"
    """The stream goes on at another replica."""

    WAITING = "waiting"
    """The stream's replica was lost, and it waits for another."""

    PARKED = "parked"
    """The stream has made room for others, and waits to go on."""


def resuming(num_tokens: int, num_known_tokens: int) -> str:
    """Return the notice that what the client has of an answer is generated again."""
    return f"resuming, {num_tokens} of {num_known_tokens} tokens"


def loading(model_id: str, waited_s: float) -> str:
    """Return the notice that a request waits for a model to be loaded."""
    return f"loading {model_id} ({waited_s:.0f} s)"
