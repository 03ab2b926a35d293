"""Answers in Anthropic's shape: whole messages, or the events of a stream.

A stream's events: `message_start`; for each block its start, its deltas and its stop, with a `ping`
behind the first start; `message_delta` with the stop reason and the usage; `message_stop`.

Source: https://docs.claude.com/en/api/messages-streaming
"""

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from deployments.contract.errors import RaystreamError
from deployments.contract.output import TextDelta
from serve_app.api.answers.blocks import Block, CallMade
from serve_app.api.answers.reader import Finished
from serve_app.api.messages.schema import (
    AnswerBlock,
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    Message,
    MessagesUsage,
    OutputTokensDetails,
    StopReason,
)
from serve_app.api.messages.signature import UNSIGNED, carrying
from serve_app.api.openai.usage import Usage, UsageTally
from serve_app.api.reasoning.parser import Reasoning
from serve_app.api.requests.open_answer import OpenAnswer
from serve_app.api.tools.parsing.events import Text
from serve_app.streaming.error_event import error_event
from serve_app.streaming.sse import encode_typed

Fields = dict[str, Any]


async def whole_message(id_: str, opened: OpenAnswer, omits_thinking: bool = False) -> Message:
    """Read the answer to its end and return it.

    Args:
        id_: The message's id.
        opened: The answer.
        omits_thinking: Whether only the signatures of its reasoning carry its text.

    Raises:
        RaystreamError: The answer has failed.
    """
    blocks, finish, usage = await opened.read()
    return Message(
        id=id_,
        model=opened.model.description.id,
        content=[_answer_block(block, omits_thinking) for block in blocks],
        stop_reason=_stop_reason(finish),
        stop_sequence=_stop_sequence(finish),
        usage=_usage(usage),
    )


class MessageWriter:
    """Frames one answer as Anthropic's events."""

    def __init__(
        self,
        id_: str,
        opened: OpenAnswer,
        omits_thinking: bool = False,
    ) -> None:
        """Start before the answer; see `whole_message`."""
        self._id, self._model = id_, opened.model.description.id
        self._reader = opened.reader()
        self._tally = UsageTally(opened.choices, opened.reasoning)
        self._num_blocks = 0
        self._open: type[Block] | None = None  # the kind of the block that goes on
        self._omitted: list[str] | None = [] if omits_thinking else None  # of this block

    def opening(self) -> bytes:
        """Return the message without its content."""
        message = Message(
            id=self._id,
            model=self._model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_usage(self._tally.usage()),
        )
        return encode_typed({"type": "message_start", "message": message.model_dump()})

    def gain(self, delta: TextDelta) -> bytes:
        """Return the events of a delta."""
        self._tally.add(0, delta)
        return b"".join(
            encode_typed(event)
            for found in self._reader.feed(delta)
            for event in self._events(found)
        )

    def ending(self) -> bytes:
        """Return the last event."""
        return encode_typed({"type": "message_stop"})

    def failure(self, error: RaystreamError) -> bytes:
        """Return the event of an error."""
        return error_event(error)

    def _events(self, found: Block | Finished) -> Iterator[Fields]:
        if self._open is not None and (self._open is not type(found) or self._open is CallMade):
            yield from self._stop()
        match found:
            case Finished():
                yield self._finish(found)
            case Reasoning(text):
                if self._open is None:
                    yield from self._start(found, AnswerThinking(thinking="", signature=""))
                if self._omitted is None:
                    yield self._delta("thinking_delta", thinking=text)
                else:
                    self._omitted.append(text)
            case Text(text):
                if self._open is None:
                    yield from self._start(found, AnswerText(text=""))
                yield self._delta("text_delta", text=text)
            case CallMade(call):
                begun = AnswerToolUse(id=call.id, name=call.name, input={})
                yield from self._start(found, begun)
                yield self._delta("input_json_delta", partial_json=found.arguments)

    def _start(self, found: Block, block: AnswerBlock) -> Iterator[Fields]:
        self._open = type(found)
        start = {"type": "content_block_start", "index": self._num_blocks}
        yield {**start, "content_block": block.model_dump()}
        if self._num_blocks == 0:
            yield {"type": "ping"}

    def _delta(self, kind: str, **fields: str) -> Fields:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _stop(self) -> Iterator[Fields]:
        if self._open is Reasoning:
            yield self._delta("signature_delta", signature=self._signature())
        yield {"type": "content_block_stop", "index": self._num_blocks}
        self._open = None
        self._num_blocks += 1

    def _signature(self) -> str:
        """Return the signature of a block of reasoning that ends."""
        if self._omitted is None:
            return UNSIGNED
        text = "".join(self._omitted)
        self._omitted.clear()
        return carrying(text)

    def _finish(self, finish: Finished) -> Fields:
        why = {"stop_reason": _stop_reason(finish), "stop_sequence": _stop_sequence(finish)}
        usage = _usage(self._tally.usage()).model_dump()
        return {"type": "message_delta", "delta": why, "usage": usage}


def _answer_block(block: Block, omits_thinking: bool) -> AnswerBlock:
    match block:
        case Reasoning(text) if omits_thinking:
            return AnswerThinking(thinking="", signature=carrying(text))
        case Reasoning(text):
            return AnswerThinking(thinking=text, signature=UNSIGNED)
        case Text(text):
            return AnswerText(text=text)
        case CallMade(call):
            return AnswerToolUse(id=call.id, name=call.name, input=_input_of(block.arguments))


def _input_of(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; of arguments that were cut, as much as had arrived."""
    if not arguments:
        return {}
    found: dict[str, Any] = from_json(arguments, allow_partial="trailing-strings")
    return found


def _stop_reason(finish: Finished) -> StopReason:
    match finish.reason:
        case "length":
            return "max_tokens"
        case "tool_calls":
            return "tool_use"
        case "stop":
            return "end_turn" if finish.stop is None else "stop_sequence"


def _stop_sequence(finish: Finished) -> str | None:
    return finish.stop if _stop_reason(finish) == "stop_sequence" else None


def _usage(usage: Usage) -> MessagesUsage:
    details = usage.completion_tokens_details
    num_cached = usage.prompt_tokens_details.cached_tokens
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - num_cached,
        cache_read_input_tokens=num_cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=None
        if details is None
        else OutputTokensDetails(thinking_tokens=details.reasoning_tokens),
    )
