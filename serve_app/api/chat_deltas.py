"""What the pieces of one streamed choice tell: text, calls of tools, and how it ended.

Of a call its id and its function's name come first and once, then its arguments in pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deployments.contract import TokenLogprobs
from serve_app.access_log import note_finish
from serve_app.api.tool_offer import ToolOffer
from serve_app.generation import Piece, TrueFinish
from serve_app.tool_calls.answer import new_call_id
from serve_app.tool_calls.events import ArgumentsGained, CallEnded, CallStarted, Event, Text

AnswerFinish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ChoiceGain:
    """What one chunk tells of a choice.

    Attributes:
        delta: OpenAI's.
        logprobs: Of the tokens that have come since the last chunk.
        finish_reason: With the last chunk alone.
    """

    delta: dict[str, Any]
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: AnswerFinish | None = None


class ChoiceDeltas:
    """One choice."""

    def __init__(self, offer: ToolOffer) -> None:
        """Start in front of the answer to a request that offers these tools."""
        self._offer = offer
        self._parser = offer.parser()
        self._has_called = False

    def gain(self, piece: Piece) -> list[ChoiceGain]:
        """Return what a piece adds; the finish in a chunk of its own.

        A text may be empty where there are logprobs of tokens whose text is held back.
        """
        deltas = self._deltas(piece)
        if not deltas and piece.logprobs:
            deltas = [{"content": ""}]
        gains = [ChoiceGain(delta, () if at else piece.logprobs) for at, delta in enumerate(deltas)]
        if piece.finish_reason is not None:
            reason = finish_reason(piece.finish_reason, self._has_called)
            note_finish(reason)
            gains.append(ChoiceGain({}, finish_reason=reason))
        return gains

    def _deltas(self, piece: Piece) -> list[dict[str, Any]]:
        if self._parser is None:
            return [{"content": piece.text}] if piece.text else []
        events = self._parser.feed(piece.text)
        if piece.finish_reason is not None:
            events += self._parser.finish(is_cut=piece.finish_reason == "length")
        self._has_called |= any(isinstance(event, CallEnded) for event in events)
        found = (self._delta(event) for event in events)
        return [delta for delta in found if delta is not None]

    def _delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Text(text):
                return {"content": text}
            case CallStarted(index, name):
                assert self._offer.format is not None, "there are calls only where a format is"
                call_id = new_call_id(self._offer.format)
                function = {"name": name, "arguments": ""}
                return _call(index, id=call_id, type="function", function=function)
            case ArgumentsGained(index, text):
                return _call(index, function={"arguments": text})
            case _:
                return None


def finish_reason(of_text: TrueFinish, has_called: bool) -> AnswerFinish:
    """Return why an answer ended: for its calls, if it holds any and has come to its own end."""
    return "tool_calls" if has_called and of_text == "stop" else of_text


def _call(index: int, **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **fields}]}
