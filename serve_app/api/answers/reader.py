"""Reads an answer: turns its deltas into events, in the order of the text.

The reasoning comes first; on channels there may be more of it later. Then come texts and calls. A
call begins, its arguments grow, and it ends. It may also be cut by the answer's maximum length, or
break, and then it was text. The finish comes last. The surfaces frame these events, and `blocks`
puts those of a call together.
"""

import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from deployments.contract.formats.tool_call_format import ToolCallFormat
from deployments.contract.output import TextDelta
from serve_app.api.answers.channel_reader import ChannelReader
from serve_app.api.reasoning.parser import Reasoning
from serve_app.api.reasoning.separation import Separation
from serve_app.api.tools.offer import ToolOffer
from serve_app.api.tools.parsing.events import (
    ArgumentsGained,
    CallBroken,
    CallCut,
    CallEnded,
    CallStarted,
    Event,
    Text,
)
from serve_app.api.tools.parsing.parser import ToolCallParser
from serve_app.backends.streams.choices import TrueFinish, true_finish
from serve_app.http.request_record import note_finish

CALL_ID_LENGTH = 24
_LETTERS_AND_DIGITS = string.ascii_letters + string.digits

AnswerFinish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call has begun: the function's name is known.

    Attributes:
        index: The call's place among the calls of the answer, from 0.
        id: Names it in the next request.
        name: One of the offered functions.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of the answer.

    Attributes:
        reason: Why it ended; `tool_calls` if it ended by itself and holds a whole call.
        stop: The stop string that ended the text, if one did.
    """

    reason: AnswerFinish
    stop: str | None


AnswerEvent = (
    Reasoning | Text | CallBegun | ArgumentsGained | CallEnded | CallCut | CallBroken | Finished
)


class AnswerReader:
    """Reads one answer."""

    def __init__(
        self,
        offer: ToolOffer,
        reasoning: Separation | None,
        draw: Callable[[str], str] = secrets.choice,
    ) -> None:
        """Start before the answer.

        Args:
            offer: How calls are found.
            reasoning: How reasoning is separated; None if it is not.
            draw: Draws the characters of calls' ids.
        """
        self._draw = draw
        self._channels = _channel_reader(offer, reasoning)
        self._separates = reasoning is not None
        self._splitter = None
        if reasoning is not None and self._channels is None:
            self._splitter = reasoning.parser()
        self._parser = None if self._channels is not None else offer.parser()
        self._format = offer.format
        self._has_called = False

    def feed(self, delta: TextDelta) -> list[AnswerEvent]:
        """Return what a delta adds."""
        text, reason = delta.text, delta.finish_reason
        finish = None if reason is None else true_finish(reason)
        found: list[AnswerEvent] = []
        if self._splitter is not None:
            split = self._splitter.feed(text)
            if finish is not None:
                split += self._splitter.finish()
            text = split.content
            if split.reasoning:
                found.append(Reasoning(split.reasoning))
        if self._channels is not None:
            found += self._read_channels(self._channels, text, finish)
        elif self._parser is not None:
            found += map(self._named, self._parse(self._parser, text, finish))
        elif text:
            found.append(Text(text))
        if finish is not None:
            shown: AnswerFinish = "tool_calls" if self._has_called and finish == "stop" else finish
            note_finish(shown)
            found.append(Finished(shown, delta.stop))
        return found

    def _read_channels(
        self, channels: ChannelReader, text: str, finish: TrueFinish | None
    ) -> Iterable[AnswerEvent]:
        events = channels.feed(text)
        if finish is not None:
            events += channels.finish(is_cut=finish == "length")
        for event in events:
            self._has_called |= isinstance(event, CallEnded)
            if isinstance(event, Reasoning):
                yield event if self._separates else Text(event.text)
            else:
                yield self._named(event)

    def _parse(
        self, parser: ToolCallParser, text: str, finish: TrueFinish | None
    ) -> Iterable[Event]:
        events = parser.feed(text)
        if finish is not None:
            events += parser.finish(is_cut=finish == "length")
        self._has_called |= any(isinstance(event, CallEnded) for event in events)
        return events

    def _named(self, event: Event) -> AnswerEvent:
        if not isinstance(event, CallStarted):
            return event
        assert self._format is not None, "calls are found only by their format"
        return CallBegun(event.index, new_call_id(self._format, self._draw), event.name)


def _channel_reader(offer: ToolOffer, reasoning: Separation | None) -> ChannelReader | None:
    """Return a reader of an answer on channels; None if the model writes none."""
    has_calls = offer.format is not None and offer.format.has_channels
    if has_calls:
        return ChannelReader(offer.names, offer.max_calls)
    has_channels = reasoning is not None and reasoning.format.channel is not None
    return ChannelReader() if has_channels else None


def new_call_id(known: ToolCallFormat, draw: Callable[[str], str] = secrets.choice) -> str:
    """Return a random id for a call, in the form that the model's chat template accepts.

    Args:
        known: The model's form of calls.
        draw: Draws each of its characters.
    """
    length = known.call_id_length
    drawn = "".join(draw(_LETTERS_AND_DIGITS) for _ in range(length or CALL_ID_LENGTH))
    return drawn if length else f"call_{drawn}"
