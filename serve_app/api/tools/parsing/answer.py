"""The whole of an answer that may hold calls."""

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass

from deployments.contract import ToolCall
from deployments.tool_call_format import ToolCallFormat
from serve_app.tool_calls.events import (
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
    """Text and calls.

    Attributes:
        text: All that belongs to no call.
        calls: The whole calls, in order; behind them perhaps one that was cut.
    """

    text: str
    calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, events: Iterable[Event], known: ToolCallFormat) -> "ToolAnswer":
        """Return what all events of an answer make together.

        A call that broke is text. One that was cut has arguments as far as they came.
        """
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
        return cls("".join(texts), tuple(calls))


def new_call_id(known: ToolCallFormat) -> str:
    """Return a random name for a call, such as the model's template will take back."""
    length = known.call_id_length
    drawn = "".join(secrets.choice(_LETTERS_AND_DIGITS) for _ in range(length or CALL_ID_LENGTH))
    return drawn if length else f"call_{drawn}"
