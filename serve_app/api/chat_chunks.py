"""The events of a streamed chat completion, in their order.

Of each choice the role comes first and once, then the text, then the finish reason in a chunk
without text. The choices' chunks come as they are ready. The usage comes last, if it was asked for.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from serve_app.api.chat_deltas import ChoiceDeltas, ChoiceGain
from serve_app.api.chat_logprobs import ChoiceLogprobs
from serve_app.api.chat_schema import StreamOptions, Usage
from serve_app.api.tool_offer import NO_TOOLS, ToolOffer
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
        self,
        head: AnswerHead,
        options: StreamOptions | None,
        num_prompt_tokens: int,
        offer: ToolOffer = NO_TOOLS,
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
        self._choices: dict[int, ChoiceDeltas] = defaultdict(lambda: ChoiceDeltas(offer))
        self.has_usage = options is not None and options.include_usage is True
        self._counts_always = (
            self.has_usage and options is not None and options.continuous_usage_stats is True
        )

    def role(self, index: int) -> bytes:
        """Return the first chunk of a choice."""
        return self._chunk(index, ChoiceGain({"role": "assistant", "content": ""}))

    def gain(self, index: int, piece: Piece) -> bytes:
        """Return the chunks for what a piece tells; none if it tells nothing."""
        self._num_tokens += piece.num_tokens
        return b"".join(self._chunk(index, gain) for gain in self._choices[index].gain(piece))

    def usage(self) -> bytes:
        """Return the chunk that holds no choice."""
        return encode_json({**self._head, "choices": [], "usage": self._usage()})

    def _chunk(self, index: int, gain: ChoiceGain) -> bytes:
        choice = {
            "index": index,
            "delta": gain.delta,
            "logprobs": ChoiceLogprobs.of(gain.logprobs).model_dump() if gain.logprobs else None,
            "finish_reason": gain.finish_reason,
        }
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self.has_usage:
            chunk["usage"] = self._usage() if self._counts_always else None
        return encode_json(chunk)

    def _usage(self) -> dict[str, int]:
        return Usage.of(self._num_prompt_tokens, self._num_tokens).model_dump()
