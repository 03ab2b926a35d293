"""The answers to a conversation: whole messages, or the choices in the chunks of a stream.

In a stream, each choice begins with its role. Reasoning, text and tool calls follow, and the finish
reason comes last, in a chunk that has none of them. A call begins with its id and its function's
name; its arguments follow and may take several chunks.
"""

from collections import defaultdict
from typing import Any

from deployments.contract.output import TextDelta
from serve_app.api.answers.blocks import BlockReader, CallMade
from serve_app.api.answers.reader import (
    AnswerEvent,
    AnswerFinish,
    AnswerReader,
    CallBegun,
    Finished,
)
from serve_app.api.chat.schema import AnswerMessage, ChatCompletion, Choice
from serve_app.api.openai.answer_stream import AnswerHead
from serve_app.api.openai.logprobs import ChoiceLogprobs, prompt_positions
from serve_app.api.openai.usage import read_with_usage
from serve_app.api.reasoning.parser import Reasoning
from serve_app.api.reasoning.separation import LogprobsFilter, Separation
from serve_app.api.tools.offer import ToolOffer
from serve_app.api.tools.parsing.events import ArgumentsGained, Text
from serve_app.api.tools.schema import AnswerToolCall
from serve_app.backends.streams.choices import Choices


async def whole_answer(
    head: AnswerHead,
    choices: Choices,
    offer: ToolOffer,
    reasoning: Separation | None = None,
    num_prompt_logprobs: int | None = None,
) -> ChatCompletion:
    """Read all choices to their end and return the whole answer.

    Args:
        head: The answer's own fields.
        choices: The streams.
        offer: How calls are found.
        reasoning: How reasoning is separated; None if it is not.
        num_prompt_logprobs: How many of the likeliest tokens to write at each position of the
            prompt; None writes no log-probabilities of the prompt.

    Raises:
        RaystreamError: A choice failed.
    """
    answers, usage = await read_with_usage(choices, reasoning)
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=[
            _whole_choice(index, answer, offer, reasoning) for index, answer in enumerate(answers)
        ],
        usage=usage,
        prompt_logprobs=await prompt_positions(answers[0].prompt_logprobs, num_prompt_logprobs),
    )


def _whole_choice(
    index: int, answer: TextDelta, offer: ToolOffer, reasoning: Separation | None
) -> Choice:
    *blocks, finish = BlockReader(offer, reasoning).feed(answer)
    assert isinstance(finish, Finished), "`read_to_end` returns only finished texts"
    text = "".join(each.text for each in blocks if isinstance(each, Text))
    thoughts = "".join(each.text for each in blocks if isinstance(each, Reasoning))
    calls = [each.call for each in blocks if isinstance(each, CallMade)]
    logprobs = _logprobs_filter(reasoning).shown(answer)
    return Choice(
        index=index,
        message=AnswerMessage(
            content=None if (calls or thoughts) and not text else text,
            reasoning_content=thoughts if reasoning is None or reasoning.is_shown else None,
            tool_calls=[AnswerToolCall.of(call) for call in calls],
        ),
        # Empty, not None, if they were requested and all are hidden.
        logprobs=ChoiceLogprobs.of(logprobs) if answer.logprobs else None,
        finish_reason=finish.reason,
    )


class ChatFramer:
    """Makes the choices in the chunks of a stream."""

    def __init__(self, offer: ToolOffer, reasoning: Separation | None = None) -> None:
        self._shows_reasoning = reasoning is not None and reasoning.is_shown
        self._readers = defaultdict[int, AnswerReader](lambda: AnswerReader(offer, reasoning))
        self._logprobs = defaultdict[int, LogprobsFilter](lambda: _logprobs_filter(reasoning))

    def opening(self, index: int) -> dict[str, Any]:
        """Return the choice with the role."""
        return _chunk_choice(index, {"role": "assistant", "content": ""})

    def gain(self, index: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Return a chunk's choice for each event of a delta, with the finish in one of its own.

        If tokens have logprobs but their text is still held back, the choice's text is empty.
        Hidden reasoning adds nothing, nor do its tokens.
        """
        events = self._readers[index].feed(delta)
        choices = [
            _chunk_choice(index, gained)
            for event in events
            if (gained := self._delta(event)) is not None
        ]
        if shown := self._logprobs[index].shown(delta):
            choices = choices or [_chunk_choice(index, {"content": ""})]
            choices[0]["logprobs"] = ChoiceLogprobs.of(shown).model_dump()
        if events and isinstance(finish := events[-1], Finished):
            choices.append(_chunk_choice(index, {}, finish.reason))
        return choices

    def _delta(self, event: AnswerEvent) -> dict[str, Any] | None:
        """Return an event as a chunk's `delta`; None if clients do not see it."""
        match event:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text} if self._shows_reasoning else None
            case CallBegun(index, id_, name):
                function = {"name": name, "arguments": ""}
                return _call(index, id=id_, type="function", function=function)
            case ArgumentsGained(index, text):
                return _call(index, function={"arguments": text})
            case _:
                return None

    def size(self, choice: dict[str, Any]) -> int:
        """Return the length of a choice's text or arguments, and 1 for each mark."""
        delta = choice["delta"]
        text = _text_of(delta)
        is_mark = bool(delta) if text is None else False
        return len(text or "") + is_mark + (choice["finish_reason"] is not None)

    def behind(self, choice: dict[str, Any], size: int) -> dict[str, Any]:
        """Return a choice without the beginning of its text or arguments."""
        return {**choice, "delta": _behind(choice["delta"], size)}

    def bare(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a choice's log-probabilities without its content."""
        return {**choice, "delta": {}, "finish_reason": None}


def _logprobs_filter(reasoning: Separation | None) -> LogprobsFilter:
    return LogprobsFilter() if reasoning is None else reasoning.logprobs_filter()


def _chunk_choice(
    index: int, delta: dict[str, Any], finish_reason: AnswerFinish | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _text_of(delta: dict[str, Any]) -> str | None:
    """Return the text of a delta, whatever it is a part of; None for a role or a call's name."""
    if "role" in delta:
        return None
    text: str | None = delta.get("content", delta.get("reasoning_content"))
    if calls := delta.get("tool_calls"):
        text = None if "id" in calls[0] else calls[0]["function"]["arguments"]
    return text


def _behind(delta: dict[str, Any], size: int) -> dict[str, Any]:
    """Return a delta without the beginning of its text."""
    if calls := delta.get("tool_calls"):
        return _call(
            calls[0]["index"], function={"arguments": calls[0]["function"]["arguments"][size:]}
        )
    return {part: text[size:] for part, text in delta.items()}


def _call(index: int, **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **fields}]}
