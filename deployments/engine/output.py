"""What the engine says about a sequence while it runs.

A delta carries token ids beside the text, so that whoever passed it on can resume the sequence
elsewhere and can count tokens exactly.
"""

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a sequence gained in one engine step.

    Attributes:
        token_ids: New token ids, in order.
        text: New text that is final. It may be empty while bytes of a character or a possible
            stop string are held back.
        finish_reason: Set on the last delta alone.
        error: What went wrong, with `FinishReason.ERROR` alone.
        num_cached_tokens: On the first delta alone: tokens of the prompt that were not computed
            but taken over from another sequence that begins alike.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0
