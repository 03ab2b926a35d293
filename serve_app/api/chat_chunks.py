"""The events of a streamed chat completion, in their order.

The role comes first and once, then the text, then the finish reason in a chunk without text, then
the usage if it was asked for.
"""

from dataclasses import dataclass
from typing import Any

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

    def role(self) -> bytes:
        """Return the first chunk."""
        return self._chunk({"role": "assistant", "content": ""})

    def gain(self, piece: Piece) -> bytes:
        """Return a chunk for the text, if there is any, and one for the finish, if it is here."""
        self._num_tokens += piece.num_tokens
        text = self._chunk({"content": piece.text}) if piece.text else b""
        finish = self._chunk({}, piece.finish_reason) if piece.finish_reason else b""
        return text + finish

    def usage(self) -> bytes:
        """Return the chunk that holds no choice."""
        return encode_json({**self._head, "choices": [], "usage": self._usage()})

    def _chunk(self, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self.has_usage:
            chunk["usage"] = self._usage() if self._counts_always else None
        return encode_json(chunk)

    def _usage(self) -> dict[str, int]:
        return Usage.of(self._num_prompt_tokens, self._num_tokens).model_dump()
