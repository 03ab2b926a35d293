"""Reads an answer as blocks: reasoning, text and whole calls.

Reasoning and text are reported as they arrive. A call is reported once it is whole, or cut by the
answer's maximum length: until then it may still turn out to be text. So a stream holds the same
blocks as the whole answer.
"""

import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from pydantic_core import from_json

from deployments.contract.messages import ToolCall
from deployments.contract.output import TextDelta
from serve_app.api.answers.reader import (
    AnswerEvent,
    AnswerReader,
    CallBegun,
    Finished,
)
from serve_app.api.reasoning.parser import Reasoning
from serve_app.api.reasoning.separation import Separation
from serve_app.api.tools.offer import ToolOffer
from serve_app.api.tools.parsing.events import (
    ArgumentsGained,
    CallBroken,
    CallCut,
    CallEnded,
    Text,
)


@dataclass(frozen=True, slots=True)
class CallMade:
    """A call.

    Attributes:
        call: The call, with its arguments as the model wrote them.
        is_whole: Whether they are complete; only the last call may be cut.
    """

    call: ToolCall
    is_whole: bool

    @property
    def arguments(self) -> str:
        """The arguments as clients' parsers read them, which are strict: JSON, or its beginning.

        What a model has written need not be JSON before a call is whole, and Python's own parser
        takes half a surrogate pair.
        """
        text = self.call.arguments
        try:
            from_json(text, allow_partial="off" if self.is_whole else "trailing-strings")
        except ValueError:
            if not self.is_whole:
                return ""
            written = json.dumps(json.loads(text), ensure_ascii=False)
            return written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return text


Block = Reasoning | Text | CallMade


class BlockReader:
    """Reads one answer."""

    def __init__(
        self,
        offer: ToolOffer,
        reasoning: Separation | None,
        draw: Callable[[str], str] = secrets.choice,
    ) -> None:
        """Start before the answer; see `AnswerReader`."""
        self._reader = AnswerReader(offer, reasoning, draw)
        self._id = self._name = ""  # of the call that has begun
        self._arguments: list[str] = []

    def feed(self, delta: TextDelta) -> list[Block | Finished]:
        """Return what a delta adds."""
        found = map(self._block, self._reader.feed(delta))
        return [block for block in found if block is not None]

    def read(self, answer: TextDelta) -> tuple[list[Block], Finished]:
        """Return the blocks of a whole answer, each text and each reasoning as one, and its end."""
        *blocks, finish = self.feed(answer)
        assert isinstance(finish, Finished), "`read_to_end` returns only finished texts"
        return joined(blocks), finish

    def _block(self, event: AnswerEvent) -> Block | Finished | None:
        match event:
            case Text() | Reasoning() | Finished():
                return event
            case CallBegun(_, id_, name):
                self._id, self._name, self._arguments = id_, name, []
                return None
            case ArgumentsGained(_, text):
                self._arguments.append(text)
                return None
            case CallEnded() | CallCut():
                call = ToolCall(self._id, self._name, "".join(self._arguments))
                return CallMade(call, is_whole=isinstance(event, CallEnded))
            case CallBroken(_, raw):
                return Text(raw)


def joined(blocks: Iterable[Block | Finished]) -> list[Block]:
    """Return an answer's blocks without its end, each text and each reasoning as one."""
    found: list[Block] = []
    for kind, group in groupby(blocks, type):
        if kind is CallMade:
            found += (each for each in group if isinstance(each, CallMade))
        elif kind is not Finished:
            text = "".join(each.text for each in group if isinstance(each, Text | Reasoning))
            found.append(Text(text) if kind is Text else Reasoning(text))
    return found
