"""A whole answer that may hold calls."""

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass

from deployments.contract import ToolCall
from deployments.tool_call_format import ToolCallFormat
from serve_app.api.tools.parsing.events import (
    ArgumentsGained,
    CallBroken,
    CallCut,
    CallEnded,
    CallStarted,
    Event,
    Text,
)

CALL_ID_LENGTH = 24
_LETTERS_AND_DIGITS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The text and the calls of an answer.

    Attributes:
        text: All text outside calls.
        calls: The calls, in order; only the last one may be cut off.
        num_whole: How many of the calls are whole: all, or all but the last.
    """

    text: str
    calls: tuple[ToolCall, ...]
    num_whole: int = 0

    @classmethod
    def of(cls, events: Iterable[Event], known: ToolCallFormat) -> "ToolAnswer":
        """Return the answer that these events describe together.

        A broken call becomes text. A cut call keeps the arguments that had arrived.
        """
        num_whole = 0
        texts: list[str] = []
        calls: list[ToolCall] = []
        name, arguments = "", ""
        for event in events:
            match event:
                case Text(text) | CallBroken(_, text):
                    texts.append(text)
                case CallStarted(_, name):
                    arguments = ""
                case ArgumentsGained(_, text):
                    arguments += text
                case CallEnded() | CallCut():
                    calls.append(ToolCall(new_call_id(known), name, arguments))
                    num_whole += isinstance(event, CallEnded)
        return cls("".join(texts), tuple(calls), num_whole)


def new_call_id(known: ToolCallFormat) -> str:
    """Return a random id for a call, in the form that the model's chat template accepts."""
    length = known.call_id_length
    drawn = "".join(secrets.choice(_LETTERS_AND_DIGITS) for _ in range(length or CALL_ID_LENGTH))
    return drawn if length else f"call_{drawn}"
