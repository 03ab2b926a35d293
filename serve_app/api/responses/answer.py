"""Answers in the shape of OpenAI's responses: whole, or the events of a stream.

A stream's events, numbered from 0: `response.created` and `.in_progress`; for each item
`output_item.added`, its parts or its arguments, and `output_item.done`; last `response.completed`,
`.incomplete` or `.failed`, which holds the whole response.

Source: https://platform.openai.com/docs/api-reference/responses-streaming
"""

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deployments.contract.errors import RaystreamError
from deployments.contract.output import TextDelta
from serve_app.api.answers.blocks import Block, CallMade
from serve_app.api.answers.reader import Finished
from serve_app.api.openai.usage import Usage, UsageTally
from serve_app.api.reasoning.parser import Reasoning
from serve_app.api.requests.open_answer import OpenAnswer
from serve_app.api.responses.answer_schema import (
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputReasoningText,
    OutputText,
    ResponseBody,
    ResponseFailure,
    ResponsesTokensDetails,
    ResponsesUsage,
    Status,
)
from serve_app.api.tools.parsing.events import Text
from serve_app.streaming.sse import encode_typed

Fields = dict[str, Any]


Namespaced = Mapping[str, tuple[str, str]]
"""The namespace and the own name of each function in a namespace, by the name that models see."""


async def whole_response(
    begun: ResponseBody, opened: OpenAnswer, namespaced: Namespaced
) -> ResponseBody:
    """Read the answer to its end and return it.

    Args:
        begun: The response without output.
        opened: The answer.
        namespaced: The functions that were offered in namespaces.

    Raises:
        RaystreamError: The answer has failed.
    """
    blocks, finish, usage = await opened.read()
    status = _status(finish)
    output = [
        _item(begun.id, at, block, status if block is blocks[-1] else "completed", namespaced)
        for at, block in enumerate(blocks)
    ]
    return _ended(begun, output, status, usage)


def queued_events(begun: ResponseBody) -> tuple[bytes, int]:
    """Return the events of a response that waits for an ingress to run it, and their number."""
    told = begun.model_dump()
    kinds = ("response.created", "response.queued")
    events = [
        encode_typed({"type": kind, "sequence_number": number, "response": told})
        for number, kind in enumerate(kinds)
    ]
    return b"".join(events), len(events)


def empty_response(begun: ResponseBody) -> ResponseBody:
    """Return a response for which nothing was generated."""
    return _ended(begun, [], "completed", Usage.of(0, 0, 0))


class ResponseWriter:
    """Frames one answer as the events of a response.

    Attributes:
        ended: The response, whole once its last event is written.
        num_events: The events so far.
    """

    def __init__(
        self,
        begun: ResponseBody,
        opened: OpenAnswer,
        namespaced: Namespaced,
        *,
        num_told: int = 0,
        draw: Callable[[str], str] = secrets.choice,
    ) -> None:
        """Start before the answer; see also `whole_response`.

        Args:
            begun: The response without output.
            opened: The answer.
            namespaced: The functions that were offered in namespaces.
            num_told: The events before, if the response was queued: see `queued_events`.
            draw: Draws the characters of calls' ids.
        """
        self.ended = begun
        self._begun = begun
        self._namespaced = namespaced
        self._reader = opened.reader(draw)
        self._tally = UsageTally(opened.choices, opened.reasoning)
        self._output: list[OutputItem] = []
        self._open: type[Reasoning | Text] | None = None  # the item that goes on
        self._pieces: list[str] = []  # its text so far
        self._status: Status = "completed"
        self.num_events = num_told

    def opening(self) -> bytes:
        """Return the response without output, twice as at OpenAI; once if it was queued."""
        told = self._begun.model_dump()
        if self.num_events:
            return self._event("response.in_progress", response=told)
        created = self._event("response.created", response=told)
        return created + self._event("response.in_progress", response=told)

    def gain(self, delta: TextDelta) -> bytes:
        """Return the events of a delta."""
        self._tally.add(0, delta)
        found = self._reader.feed(delta)
        return b"".join(event for each in found for event in self._events(each))

    def ending(self) -> bytes:
        """Return the last event, with the whole response."""
        self.ended = _ended(self._begun, self._output, self._status, self._tally.usage())
        return self._last()

    def failure(self, error: RaystreamError) -> bytes:
        """Return the last event of a response that has failed, with its whole items."""
        ended = _ended(self._begun, self._output, "failed", self._tally.usage())
        self.ended = ended.model_copy(update={"error": ResponseFailure(message=error.message)})
        return self._last()

    def ending_unstored(self) -> bytes:
        """Return the last event once more, after the response could not be stored."""
        self.num_events -= 1
        self.ended = self.ended.model_copy(update={"store": False})
        return self._last()

    def _last(self) -> bytes:
        return self._event(f"response.{self.ended.status}", response=self.ended.model_dump())

    def _event(self, kind: str, **fields: Any) -> bytes:
        numbered = {"type": kind, "sequence_number": self.num_events, **fields}
        self.num_events += 1
        return encode_typed(numbered)

    def _events(self, found: Block | Finished) -> Iterator[bytes]:
        if isinstance(found, Finished):
            self._status = _status(found)
        if self._open is not None and self._open is not type(found):
            yield from self._close(self._open("".join(self._pieces)))
        if isinstance(found, CallMade):
            yield from self._call(found)
        elif isinstance(found, Reasoning | Text):
            if self._open is None:
                yield from self._start(type(found))
            self._pieces.append(found.text)
            yield self._of_text(found, "delta", delta=found.text)

    def _start(self, kind: type[Reasoning | Text]) -> Iterator[bytes]:
        self._open, self._pieces = kind, []
        item = self._item(kind(""), "in_progress")
        yield self._of_item("added", item.model_copy(update={"content": []}))
        yield self._of_part("added", item)

    def _close(self, block: Reasoning | Text) -> Iterator[bytes]:
        item = self._item(block, self._status)
        yield self._of_text(block, "done", text=block.text)
        yield self._of_part("done", item)
        yield self._of_item("done", item)
        self._output.append(item)
        self._open = None

    def _call(self, made: CallMade) -> Iterator[bytes]:
        item = self._item(made, "completed")
        assert isinstance(item, OutputCall)
        empty = {"arguments": "", "status": "in_progress"}
        yield self._of_item("added", item.model_copy(update=empty))
        place = {"item_id": item.id, "output_index": len(self._output)}
        kind = "response.function_call_arguments"
        yield self._event(f"{kind}.delta", **place, delta=item.arguments)
        yield self._event(f"{kind}.done", **place, name=item.name, arguments=item.arguments)
        yield self._of_item("done", item)
        self._output.append(item)

    def _item(self, block: Block, status: Status) -> OutputItem:
        return _item(self._begun.id, len(self._output), block, status, self._namespaced)

    def _of_item(self, what: str, item: OutputItem) -> bytes:
        index = len(self._output)
        kind = f"response.output_item.{what}"
        return self._event(kind, output_index=index, item=item.model_dump())

    def _of_part(self, what: str, item: OutputItem) -> bytes:
        assert not isinstance(item, OutputCall)
        place = {"item_id": item.id, "output_index": len(self._output), "content_index": 0}
        part = item.content[0].model_dump()
        return self._event(f"response.content_part.{what}", **place, part=part)

    def _of_text(self, block: Reasoning | Text, what: str, **text: str) -> bytes:
        index = len(self._output)
        place = {"item_id": _item_id(self._begun.id, index), "output_index": index}
        if isinstance(block, Text):
            kind, logprobs = "response.output_text", {"logprobs": list[None]()}
        else:
            kind, logprobs = "response.reasoning_text", {}
        return self._event(f"{kind}.{what}", **place, content_index=0, **text, **logprobs)


def _item_id(response_id: str, index: int) -> str:
    return f"item_{response_id.removeprefix('resp_')}_{index}"


def _item(
    response_id: str, index: int, block: Block, status: Status, namespaced: Namespaced
) -> OutputItem:
    """Return a block as an item.

    Args:
        response_id: The response's id.
        index: The item's place in the output.
        block: The block.
        status: The status of a text; a call's own status depends on whether it is whole.
        namespaced: The functions that were offered in namespaces.
    """
    id_ = _item_id(response_id, index)
    match block:
        case Reasoning(text):
            return OutputReasoning(id=id_, status=status, content=[OutputReasoningText(text=text)])
        case Text(text):
            return OutputMessage(id=id_, status=status, content=[OutputText(text=text)])
        case CallMade(call, is_whole):
            namespace, name = namespaced.get(call.name, (None, call.name))
            return OutputCall(
                id=id_,
                status="completed" if is_whole else "incomplete",
                call_id=call.id,
                name=name,
                namespace=namespace,
                arguments=block.arguments,
            )


def _status(finish: Finished) -> Status:
    return "incomplete" if finish.reason == "length" else "completed"


def _ended(
    begun: ResponseBody, output: list[OutputItem], status: Status, usage: Usage
) -> ResponseBody:
    """Return a response that has ended."""
    details = IncompleteDetails() if status == "incomplete" else None
    ended = {
        "status": status,
        "output": output,
        "usage": _usage(usage),
        "incomplete_details": details,
    }
    return begun.model_copy(update=ended)


def _usage(usage: Usage) -> ResponsesUsage:
    details = usage.completion_tokens_details
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=usage.prompt_tokens_details.cached_tokens
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ResponsesTokensDetails(
            reasoning_tokens=0 if details is None else details.reasoning_tokens
        ),
        total_tokens=usage.total_tokens,
    )
