"""The choices in the chunks of a streamed completion: text, with the finish reason on the last."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from serve_app.api.completion_logprobs import LogprobsWriter
from serve_app.generation import Piece


class CompletionFramer:
    """Makes the choices of texts that are continued."""

    def __init__(self, echoes: Sequence[str] | None, num_per_prompt: int) -> None:
        """Start every choice.

        Args:
            echoes: The prompts' texts, if they are to be repeated.
            num_per_prompt: Choices for each prompt.
        """
        self._echoes = echoes
        self._num_per_prompt = num_per_prompt
        self._logprobs: defaultdict[int, LogprobsWriter] = defaultdict(LogprobsWriter)

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the prompt, if it is to be repeated."""
        if self._echoes is None:
            return None
        return _choice(index, self._echoes[index // self._num_per_prompt])

    def gain(self, piece: Piece) -> list[dict[str, Any]]:
        """Return a choice if there is text, or the finish, or a token to tell of."""
        if not (piece.text or piece.logprobs or piece.finish_reason):
            return []
        index = piece.choice_index
        told = self._logprobs[index].tell(piece.logprobs) if piece.logprobs else None
        logprobs = None if told is None else told.model_dump()
        return [_choice(index, piece.text, logprobs, piece.finish_reason)]


def _choice(
    index: int,
    text: str,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
