"""The continuations of prompts: whole, or as the choices in the chunks of a stream.

In a stream, the last chunk of a choice holds its finish reason.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from deployments.contract.output import PromptLogprobs, TextDelta
from serve_app.api.completions.schema import Completion, CompletionChoice, CompletionRequest
from serve_app.api.openai.answer_stream import AnswerHead
from serve_app.api.openai.logprobs import (
    CompletionLogprobs,
    LogprobsWriter,
    PromptPositions,
    prompt_positions,
)
from serve_app.api.openai.usage import read_with_usage
from serve_app.backends.streams.choices import Choices, true_finish


async def whole_answer(
    head: AnswerHead, choices: Choices, body: CompletionRequest, echoes: Sequence[str] | None
) -> Completion:
    """Read all choices to their end and return the whole answer.

    Args:
        head: The answer's id, model and time.
        choices: The streams.
        body: What is asked for.
        echoes: The prompts' texts, if the request asks to repeat them.

    Raises:
        RaystreamError: A choice failed.
    """
    answers, usage = await read_with_usage(choices)
    written: list[CompletionChoice] = []
    for at in range(len(answers) // choices.num_per_prompt):
        first = at * choices.num_per_prompt
        # The first answer to a prompt brings the prompt's log-probabilities for all.
        parts, echo = answers[first].prompt_logprobs, "" if echoes is None else echoes[at]
        prompt = await _WrittenPrompt.of(parts, body, echo)
        for index in range(first, first + choices.num_per_prompt):
            written.append(_whole_choice(index, answers[index], body, prompt))
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=written,
        usage=usage,
    )


@dataclass(frozen=True, slots=True)
class _WrittenPrompt:
    """What each whole answer to a prompt repeats of it, written once for all.

    Attributes:
        echo: The prompt's text; empty if it is not repeated.
        writer: Writes the tokens behind `logprobs`.
        logprobs: The prompt's tokens in the shape of completions; empty if they are not asked for.
        positions: The prompt's tokens in vLLM's shape; None if they are not asked for.
    """

    echo: str
    writer: LogprobsWriter
    logprobs: CompletionLogprobs
    positions: PromptPositions | None

    @classmethod
    async def of(cls, parts: Sequence[PromptLogprobs], body: CompletionRequest, echo: str) -> Self:
        """Write a prompt. Other requests go on between two parts: a prompt may be long."""
        writer = LogprobsWriter()
        logprobs = writer.write(())
        if body.num_echoed_logprobs is not None:
            for part in parts:
                logprobs.extend(writer.write_prompt(part, body.num_echoed_logprobs))
                await asyncio.sleep(0)
        return cls(echo, writer, logprobs, await prompt_positions(parts, body.prompt_logprobs))


def _whole_choice(
    index: int, answer: TextDelta, body: CompletionRequest, prompt: _WrittenPrompt
) -> CompletionChoice:
    assert answer.finish_reason is not None, "`read_to_end` returns only finished texts"
    logprobs = None
    if body.logprobs is not None:
        # The copy is deep enough: `extend` makes the lists longer, and changes no entry.
        logprobs = CompletionLogprobs(**{name: [*entries] for name, entries in prompt.logprobs})
        logprobs.extend(prompt.writer.fork().write(answer.logprobs))
    return CompletionChoice(
        index=index,
        text=prompt.echo + answer.text,
        logprobs=logprobs,
        finish_reason=true_finish(answer.finish_reason),
        prompt_logprobs=prompt.positions,
    )


@dataclass(slots=True)
class _EchoedPrompt:
    """A prompt that is repeated with its log-probabilities, until all of them are known.

    Attributes:
        text: Its text, until it is sent.
        writer: Writes the log-probabilities.
        held: What answers to it have gained meanwhile, each with the answer's index.
    """

    text: str
    writer: LogprobsWriter
    held: list[tuple[int, TextDelta]]


class CompletionFramer:
    """Makes the choices in the chunks of a stream."""

    def __init__(
        self,
        echoes: Sequence[str] | None,
        num_per_prompt: int,
        num_echoed_logprobs: int | None = None,
    ) -> None:
        """Start before the first choice.

        Args:
            echoes: The prompts' texts, if the request asks to repeat them.
            num_per_prompt: Choices for each prompt.
            num_echoed_logprobs: How many of the likeliest tokens to write at each position of
                repeated prompts; None writes no log-probabilities of prompts.
        """
        self._echoes = echoes
        self._num_per_prompt = num_per_prompt
        self._num_echoed = num_echoed_logprobs
        self._prompts: dict[int, _EchoedPrompt] = {}
        self._logprobs: defaultdict[int, LogprobsWriter] = defaultdict(LogprobsWriter)

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the choice with the prompt's text, if the request asks to repeat it.

        If it asks for the prompt's log-probabilities, too, the text comes with the first of them.
        """
        if self._echoes is None:
            return None
        at = index // self._num_per_prompt
        if self._num_echoed is None:
            return _chunk_choice(index, self._echoes[at])
        self._prompts[at] = _EchoedPrompt(self._echoes[at], LogprobsWriter(), [])
        return None

    def gain(self, index: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Return a choice if the delta has text, logprobs or a finish."""
        at = index // self._num_per_prompt
        if at in self._prompts:
            return self._repeat(at, index, delta)
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return []
        written = self._logprobs[index].write(delta.logprobs) if delta.logprobs else None
        logprobs = None if written is None else written.model_dump()
        return [_chunk_choice(index, delta.text, logprobs, delta.finish_reason)]

    def size(self, choice: dict[str, Any]) -> int:
        """Return the length of a choice's text, and 1 for a finish reason."""
        return len(choice["text"]) + (choice["finish_reason"] is not None)

    def behind(self, choice: dict[str, Any], size: int) -> dict[str, Any]:
        """Return a choice without the beginning of its text."""
        return {**choice, "text": choice["text"][size:]}

    def bare(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a choice's log-probabilities without its content."""
        return {**choice, "text": "", "finish_reason": None}

    def _repeat(self, at: int, index: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Return what a delta brings of a prompt's log-probabilities, in each of its choices.

        The first answer to a prompt brings them for all, before its first token. What the others
        gain before is held back.
        """
        prompt, first = self._prompts[at], at * self._num_per_prompt
        if index != first:
            prompt.held.append((index, delta))
            return []
        assert self._num_echoed is not None, "otherwise no prompt is waited for"
        repeated = []
        for part in delta.prompt_logprobs:
            logprobs = prompt.writer.write_prompt(part, self._num_echoed).model_dump()
            for each in range(first, first + self._num_per_prompt):
                repeated.append(_chunk_choice(each, prompt.text, logprobs))
            prompt.text = ""
        if delta.token_ids or delta.finish_reason:
            repeated += self._release(at)
            repeated += self.gain(index, delta)
        return repeated

    def _release(self, at: int) -> list[dict[str, Any]]:
        """Return what the answers to a prompt have gained before all of it was known."""
        prompt, first = self._prompts.pop(at), at * self._num_per_prompt
        for index in range(first, first + self._num_per_prompt):
            self._logprobs[index] = prompt.writer.fork()
        return [choice for held in prompt.held for choice in self.gain(*held)]


def _chunk_choice(
    index: int,
    text: str,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
