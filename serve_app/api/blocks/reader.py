"""Reads an answer's text as blocks: reasoning, text and calls, in the order of the text.

Reasoning and text are told as they arrive. A call is told once it is whole, or cut by the answer's
maximum length: until then it may still turn out to be text. So a stream holds the same blocks as
the whole answer.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from pydantic_core import from_json

from deployments.contract.messages import ToolCall
from deployments.contract.output import TextDelta
from serve_app.api.reasoning.parser import SplitText
from serve_app.api.reasoning.separation import Separation
from serve_app.api.tools.offer import ToolOffer
from serve_app.api.tools.parsing.answer import CallCollector
from serve_app.api.tools.parsing.events import CallBroken, CallEnded, Event, Text
from serve_app.backends.streams.text_stream import TrueFinish, true_finish
from serve_app.http.request_record import note_finish


@dataclass(frozen=True, slots=True)
class ReasoningGained:
    """More of the reasoning; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class TextGained:
    """More of the text; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallMade:
    """A call.

    Attributes:
        call: The call; its arguments are a JSON object, or the beginning of one.
        is_whole: Whether they are complete; only the last call may be cut.
    """

    call: ToolCall
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of the answer.

    Attributes:
        reason: Why the text ended.
        has_called: Whether the answer holds a whole call.
        stop: The stop string that ended the text, if one did.
    """

    reason: TrueFinish
    has_called: bool
    stop: str | None


Block = ReasoningGained | TextGained | CallMade
BlockEvent = Block | Finished


class BlockReader:
    """Reads one answer."""

    def __init__(self, offer: ToolOffer, reasoning: Separation | None) -> None:
        """Start before the answer.

        Args:
            offer: How calls are found.
            reasoning: How reasoning is separated; None if it is not.
        """
        self._splitter = None if reasoning is None else reasoning.parser()
        self._parser = offer.parser()
        self._calls = None if offer.format is None else CallCollector(offer.format)
        self._has_called = False

    def feed(self, delta: TextDelta) -> list[BlockEvent]:
        """Return what a delta adds.

        Raises:
            RaystreamError: The answer has failed; see `true_finish`.
        """
        finish = true_finish(delta)
        split = self._split(delta.text, is_last=finish is not None)
        found: list[BlockEvent] = [ReasoningGained(split.reasoning)] if split.reasoning else []
        found += self._answer(split.content, finish)
        if finish is not None:
            found.append(Finished(finish, self._has_called, delta.stop))
            note_finish("tool_calls" if self._has_called and finish == "stop" else finish)
        return found

    def _split(self, text: str, *, is_last: bool) -> SplitText:
        if self._splitter is None:
            return SplitText(content=text)
        split = self._splitter.feed(text)
        return split + self._splitter.finish() if is_last else split

    def _answer(self, text: str, finish: TrueFinish | None) -> Iterable[Block]:
        if self._parser is None:
            return [TextGained(text)] if text else []
        events = self._parser.feed(text)
        if finish is not None:
            events += self._parser.finish(is_cut=finish == "length")
        found = (self._block(event) for event in events)
        return [block for block in found if block is not None]

    def _block(self, event: Event) -> Block | None:
        match event:
            case Text(text) | CallBroken(_, text):
                return TextGained(text) if text else None
        assert self._calls is not None, "calls are found only by their format"
        call = self._calls.take(event)
        if call is None:
            return None
        is_whole = isinstance(event, CallEnded)
        self._has_called |= is_whole
        arguments = _readable(call.arguments, is_whole=is_whole)
        return CallMade(replace(call, arguments=arguments), is_whole)


def _readable(arguments: str, *, is_whole: bool) -> str:
    """Return a call's arguments as clients' parsers read them, which are strict.

    What a model has written needs not be JSON before a call is whole, and Python's own parser takes
    half a surrogate pair.
    """
    try:
        from_json(arguments, allow_partial="off" if is_whole else "trailing-strings")
    except ValueError:
        if not is_whole:
            return ""
        written = json.dumps(json.loads(arguments), ensure_ascii=False)
        return written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return arguments


def joined(events: Iterable[BlockEvent]) -> list[Block]:
    """Return an answer's blocks, each text and each reasoning as one."""
    blocks: list[Block] = []
    for kind, group in groupby(events, type):
        if kind is TextGained:
            texts = (each.text for each in group if isinstance(each, TextGained))
            blocks.append(TextGained("".join(texts)))
        elif kind is ReasoningGained:
            thoughts = (each.text for each in group if isinstance(each, ReasoningGained))
            blocks.append(ReasoningGained("".join(thoughts)))
        else:
            blocks += (each for each in group if isinstance(each, CallMade))
    return blocks
