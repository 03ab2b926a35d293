"""The continuations of prompts: whole, or as the choices in the chunks of a stream.

In a stream, the last chunk of a choice holds its finish reason.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from deployments.contract import TextDelta
from serve_app.api.completions.schema import Completion, CompletionChoice
from serve_app.api.openai.answer_stream import AnswerHead
from serve_app.api.openai.logprobs import LogprobsWriter
from serve_app.api.openai.usage import read_with_usage
from serve_app.backends.choices import Choices
from serve_app.backends.text_stream import true_finish


async def whole_answer(
    head: AnswerHead, choices: Choices, echoes: Sequence[str] | None
) -> Completion:
    """Read all choices to their end and return the whole answer.

    Args:
        head: The answer's id, model and time.
        choices: The streams.
        echoes: The prompts' texts, if the request asks to repeat them.

    Raises:
        RaystreamError: A choice failed.
    """
    answers, usage = await read_with_usage(choices)
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=[
            _whole_choice(
                index, answer, "" if echoes is None else echoes[index // choices.num_per_prompt]
            )
            for index, answer in enumerate(answers)
        ],
        usage=usage,
    )


def _whole_choice(index: int, answer: TextDelta, echo: str) -> CompletionChoice:
    finish = true_finish(answer)
    assert finish is not None, "`read_to_end` returns only finished texts"
    return CompletionChoice(
        index=index,
        text=echo + answer.text,
        logprobs=LogprobsWriter().write(answer.logprobs) if answer.logprobs else None,
        finish_reason=finish,
    )


class CompletionFramer:
    """Makes the choices in the chunks of a stream."""

    def __init__(self, echoes: Sequence[str] | None, num_per_prompt: int) -> None:
        """Start before the first choice.

        Args:
            echoes: The prompts' texts, if the request asks to repeat them.
            num_per_prompt: Choices for each prompt.
        """
        self._echoes = echoes
        self._num_per_prompt = num_per_prompt
        self._logprobs: defaultdict[int, LogprobsWriter] = defaultdict(LogprobsWriter)

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the choice with the prompt's text, if the request asks to repeat it."""
        if self._echoes is None:
            return None
        return _chunk_choice(index, self._echoes[index // self._num_per_prompt])

    def gain(self, index: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Return a choice if the delta has text, logprobs or a finish."""
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return []
        written = self._logprobs[index].write(delta.logprobs) if delta.logprobs else None
        logprobs = None if written is None else written.model_dump()
        return [_chunk_choice(index, delta.text, logprobs, delta.finish_reason)]


def _chunk_choice(
    index: int,
    text: str,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
