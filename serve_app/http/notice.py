"""Notices: what a client may like to know while its stream is silent.

They are sent as comments between the events of a stream, which clients skip.
"""

from enum import StrEnum


class Notice(StrEnum):
    """A notice; its value is the comment's text."""

    MOVED = "moved"
    """The stream goes on at another replica."""

    WAITING = "waiting"
    """The stream's replica was lost, and it waits for another."""
