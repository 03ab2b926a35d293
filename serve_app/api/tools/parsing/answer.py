"""A whole answer that may hold calls."""

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass

from deployments.contract.messages import ToolCall
from deployments.contract.tool_call_format import ToolCallFormat
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


class CallCollector:
    """Puts calls together from their events."""

    def __init__(self, known: ToolCallFormat) -> None:
        """Start before the first call.

        Args:
            known: How the model writes calls.
        """
        self._format = known
        self._name = ""
        self._arguments: list[str] = []

    def take(self, event: Event) -> ToolCall | None:
        """Return the call that an event ends, whole or cut; None for any other event."""
        match event:
            case CallStarted(_, name):
                self._name, self._arguments = name, []
            case ArgumentsGained(_, text):
                self._arguments.append(text)
            case CallEnded() | CallCut():
                return ToolCall(new_call_id(self._format), self._name, "".join(self._arguments))
        return None


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
        collector = CallCollector(known)
        for event in events:
            match event:
                case Text(text) | CallBroken(_, text):
                    texts.append(text)
                case _ if (call := collector.take(event)) is not None:
                    calls.append(call)
                    num_whole += isinstance(event, CallEnded)
        return cls("".join(texts), tuple(calls), num_whole)


def new_call_id(known: ToolCallFormat) -> str:
    """Return a random id for a call, in the form that the model's chat template accepts."""
    length = known.call_id_length
    drawn = "".join(secrets.choice(_LETTERS_AND_DIGITS) for _ in range(length or CALL_ID_LENGTH))
    return drawn if length else f"call_{drawn}"
