"""The events of a streamed chat completion, in their order.

Of each choice the role comes first and once, then the text, then the finish reason in a chunk
without text. The choices' chunks come as they are ready. The usage comes last, if it was asked for.
"""

from dataclasses import dataclass
from typing import Any

from serve_app.api.chat_logprobs import ChoiceLogprobs
from serve_app.api.chat_schema import StreamOptions, Usage
from serve_app.generation import Piece
from serve_app.sse import encode_json


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an answer and all its chunks share."""

    id: str
    created: int
    model: str


class ChatChunks:
    """Frames the chunks of one answer and counts its tokens."""

    def __init__(
        self, head: AnswerHead, options: StreamOptions | None, num_prompt_tokens: int
    ) -> None:
        """Start an answer to a prompt of this length."""
        self._head = {
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
        }
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self.has_usage = options is not None and options.include_usage is True
        self._counts_always = (
            self.has_usage and options is not None and options.continuous_usage_stats is True
        )

    def role(self, index: int) -> bytes:
        """Return the first chunk of a choice."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def gain(self, index: int, piece: Piece) -> bytes:
        """Return a chunk for the text, if there is any, and one for the finish, if it is here.

        A text may be empty where there are logprobs of tokens whose text is held back.
        """
        self._num_tokens += piece.num_tokens
        events = b""
        if piece.text or piece.logprobs:
            events += self._chunk(index, {"content": piece.text}, piece)
        if piece.finish_reason is not None:
            events += self._chunk(index, {}, finish_reason=piece.finish_reason)
        return events

    def usage(self) -> bytes:
        """Return the chunk that holds no choice."""
        return encode_json({**self._head, "choices": [], "usage": self._usage()})

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        piece: Piece | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        told = piece and piece.logprobs
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": ChoiceLogprobs.of(told).model_dump() if told else None,
            "finish_reason": finish_reason,
        }
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self.has_usage:
            chunk["usage"] = self._usage() if self._counts_always else None
        return encode_json(chunk)

    def _usage(self) -> dict[str, int]:
        return Usage.of(self._num_prompt_tokens, self._num_tokens).model_dump()
