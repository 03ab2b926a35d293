"""The choices in the chunks of a streamed chat completion, in their order.

Of each choice the role comes first and once, then the text and the calls of tools, then the finish
reason in a chunk without either.
"""

from collections import defaultdict
from typing import Any

from serve_app.api.chat_deltas import ChoiceDeltas, ChoiceGain
from serve_app.api.chat_logprobs import ChoiceLogprobs
from serve_app.api.tool_offer import ToolOffer
from serve_app.generation import Piece


class ChatFramer:
    """Makes the choices of a conversation's next message."""

    def __init__(self, offer: ToolOffer) -> None:
        """Start every choice of the answer to a request that offers these tools."""
        self._deltas: defaultdict[int, ChoiceDeltas] = defaultdict(lambda: ChoiceDeltas(offer))

    def opening(self, index: int) -> dict[str, Any]:
        """Return the role."""
        return _choice(index, ChoiceGain({"role": "assistant", "content": ""}))

    def gain(self, piece: Piece) -> list[dict[str, Any]]:
        """Return a choice for each thing that a piece tells; see `ChoiceDeltas.gain`."""
        index = piece.choice_index
        return [_choice(index, gain) for gain in self._deltas[index].gain(piece)]


def _choice(index: int, gain: ChoiceGain) -> dict[str, Any]:
    return {
        "index": index,
        "delta": gain.delta,
        "logprobs": ChoiceLogprobs.of(gain.logprobs).model_dump() if gain.logprobs else None,
        "finish_reason": gain.finish_reason,
    }
