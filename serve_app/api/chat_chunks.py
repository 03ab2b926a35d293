"""The choices in the chunks of a streamed chat completion, in their order.

Of each choice the role comes first and once, then the text, then the finish reason in a chunk
without text.
"""

from typing import Any

from serve_app.api.chat_logprobs import ChoiceLogprobs
from serve_app.generation import Piece


class ChatFramer:
    """Makes the choices of a conversation's next message."""

    def opening(self, index: int) -> dict[str, Any]:
        """Return the role."""
        return _choice(index, {"role": "assistant", "content": ""})

    def gain(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """Return a choice for the text, if there is any, and one for the finish, if it is here.

        A text may be empty where there are logprobs of tokens whose text is held back.
        """
        choices = []
        if piece.text or piece.logprobs:
            choices.append(_choice(index, {"content": piece.text}, piece))
        if piece.finish_reason is not None:
            choices.append(_choice(index, {}, finish_reason=piece.finish_reason))
        return choices


def _choice(
    index: int,
    delta: dict[str, str],
    piece: Piece | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    told = piece and piece.logprobs
    return {
        "index": index,
        "delta": delta,
        "logprobs": ChoiceLogprobs.of(told).model_dump() if told else None,
        "finish_reason": finish_reason,
    }
