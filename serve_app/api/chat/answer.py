"""The answers to a conversation: whole messages, or the choices in the chunks of a stream.

In a stream, each choice begins with its role. Reasoning, text and tool calls follow, and the finish
reason comes last, in a chunk that has none of them. A call begins with its id and its function's
name; its arguments follow and may take several chunks.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.contract.output import TextDelta, TokenLogprobs
from serve_app.api.chat.schema import AnswerFinish, AnswerMessage, ChatCompletion, Choice
from serve_app.api.openai.answer_stream import AnswerHead
from serve_app.api.openai.logprobs import ChoiceLogprobs, prompt_positions
from serve_app.api.openai.usage import read_with_usage
from serve_app.api.reasoning.parser import SplitText
from serve_app.api.reasoning.separation import LogprobsFilter, Separation
from serve_app.api.tools.offer import ToolOffer
from serve_app.api.tools.parsing.answer import new_call_id
from serve_app.api.tools.parsing.events import ArgumentsGained, CallEnded, CallStarted, Event, Text
from serve_app.api.tools.schema import AnswerToolCall
from serve_app.backends.streams.choices import Choices
from serve_app.backends.streams.text_stream import TrueFinish, true_finish
from serve_app.http.request_record import note_finish


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
    finish = true_finish(answer)
    assert finish is not None, "`read_to_end` returns only finished texts"
    split = SplitText(content=answer.text) if reasoning is None else reasoning.split(answer.text)
    found = offer.read(split.content, is_cut=finish == "length")
    reason = _finish_reason(finish, has_called=found.num_whole > 0)
    note_finish(reason)
    logprobs = _logprobs_filter(reasoning).shown(answer)
    return Choice(
        index=index,
        message=AnswerMessage(
            content=None if (found.calls or split.reasoning) and not found.text else found.text,
            reasoning_content=split.reasoning if reasoning is None or reasoning.is_shown else None,
            tool_calls=[AnswerToolCall.of(call) for call in found.calls],
        ),
        # Empty, not None, if they were requested and all are hidden.
        logprobs=ChoiceLogprobs.of(logprobs) if answer.logprobs else None,
        finish_reason=reason,
    )


class ChatFramer:
    """Makes the choices in the chunks of a stream."""

    def __init__(self, offer: ToolOffer, reasoning: Separation | None = None) -> None:
        self._deltas: defaultdict[int, ChoiceDeltas] = defaultdict(
            lambda: ChoiceDeltas(offer, reasoning)
        )

    def opening(self, index: int) -> dict[str, Any]:
        """Return the choice with the role."""
        return _chunk_choice(index, ChoiceGain({"role": "assistant", "content": ""}))

    def gain(self, index: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Return a chunk's choice for each gain of a delta; see `ChoiceDeltas.gain`."""
        return [_chunk_choice(index, gain) for gain in self._deltas[index].gain(delta)]

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


@dataclass(frozen=True, slots=True)
class ChoiceGain:
    """The part of a choice that one chunk adds.

    Attributes:
        delta: The chunk's `delta`, in OpenAI's shape.
        logprobs: The log-probabilities of the tokens since the previous chunk.
        finish_reason: Only in the last chunk.
    """

    delta: dict[str, Any]
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: AnswerFinish | None = None


class ChoiceDeltas:
    """Turns the text of one choice into deltas: reasoning, text, tool calls, the finish."""

    def __init__(self, offer: ToolOffer, reasoning: Separation | None) -> None:
        self._splitter = None if reasoning is None else reasoning.parser()
        self._shows_reasoning = reasoning is not None and reasoning.is_shown
        self._logprobs = _logprobs_filter(reasoning)
        self._offer = offer
        self._parser = offer.parser()
        self._has_called = False

    def gain(self, delta: TextDelta) -> list[ChoiceGain]:
        """Return what a delta adds, with the finish in a gain of its own.

        If tokens have logprobs but their text is still held back, the gain's text is empty. Hidden
        reasoning adds nothing, nor do its tokens.
        """
        finish = true_finish(delta)
        contents = self._contents(delta.text, finish)
        logprobs = self._logprobs.shown(delta)
        if not contents and logprobs:
            contents = [{"content": ""}]
        gains = [ChoiceGain(each, () if at else logprobs) for at, each in enumerate(contents)]
        if finish is not None:
            reason = _finish_reason(finish, self._has_called)
            note_finish(reason)
            gains.append(ChoiceGain({}, finish_reason=reason))
        return gains

    def _contents(self, text: str, finish: TrueFinish | None) -> list[dict[str, Any]]:
        if self._splitter is None:
            return self._answer(text, finish)
        split = self._splitter.feed(text)
        if finish is not None:
            split += self._splitter.finish()
        is_told = split.reasoning and self._shows_reasoning
        told = [{"reasoning_content": split.reasoning}] if is_told else []
        return [*told, *self._answer(split.content, finish)]

    def _answer(self, text: str, finish: TrueFinish | None) -> list[dict[str, Any]]:
        if self._parser is None:
            return [{"content": text}] if text else []
        events = self._parser.feed(text)
        if finish is not None:
            events += self._parser.finish(is_cut=finish == "length")
        self._has_called |= any(isinstance(event, CallEnded) for event in events)
        found = (self._content(event) for event in events)
        return [content for content in found if content is not None]

    def _content(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Text(text):
                return {"content": text}
            case CallStarted(index, name):
                assert self._offer.format is not None, "calls are found only by their format"
                call_id = new_call_id(self._offer.format)
                function = {"name": name, "arguments": ""}
                return _call(index, id=call_id, type="function", function=function)
            case ArgumentsGained(index, text):
                return _call(index, function={"arguments": text})
            case _:
                return None


def _logprobs_filter(reasoning: Separation | None) -> LogprobsFilter:
    return LogprobsFilter() if reasoning is None else reasoning.logprobs_filter()


def _chunk_choice(index: int, gain: ChoiceGain) -> dict[str, Any]:
    return {
        "index": index,
        "delta": gain.delta,
        "logprobs": ChoiceLogprobs.of(gain.logprobs).model_dump() if gain.logprobs else None,
        "finish_reason": gain.finish_reason,
    }


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


def _finish_reason(of_text: TrueFinish, has_called: bool) -> AnswerFinish:
    """Return `tool_calls` if the answer holds calls and ended by itself, else the text's reason."""
    return "tool_calls" if has_called and of_text == "stop" else of_text


def _call(index: int, **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **fields}]}
