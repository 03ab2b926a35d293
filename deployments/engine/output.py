"""What the engine says about a sequence while it runs.

A delta carries token ids beside the text, so that whoever passed it on can resume the sequence
elsewhere and can count tokens exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability.

    Attributes:
        token_id: The token.
        token_bytes: What it adds to the text, in UTF-8. It may begin or end within a character; of
            a special token it is the name, though the text holds nothing of it.
        logprob: At most 0; -inf where the model rules the token out.
    """

    token_id: int
    token_bytes: bytes
    logprob: float

    @property
    def text(self) -> str:
        """The bytes as text, with U+FFFD for those that make no whole character."""
        return self.token_bytes.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token that was chosen, and the likeliest ones at its place, the likeliest first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a sequence gained in one engine step, or in several.

    Attributes:
        token_ids: New token ids, in order.
        text: New text that is final. It may be empty while bytes of a character or a possible
            stop string are held back.
        finish_reason: Set on the last delta alone.
        error: What went wrong, with `FinishReason.ERROR` alone.
        logprobs: One for each of `token_ids` if they were asked for, else none. They come with
            their ids, also where the text is held back or, at the end, cut off.
        num_cached_tokens: On the first delta alone: tokens of the prompt that were not computed
            but taken over from another sequence that begins alike.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0

    @classmethod
    def join(cls, deltas: Sequence["TextDelta"]) -> "TextDelta":
        """Return the deltas of several steps of one sequence, one or more, as one."""
        if len(deltas) == 1:
            return deltas[0]
        last = deltas[-1]
        return cls(
            tuple(token_id for delta in deltas for token_id in delta.token_ids),
            "".join(delta.text for delta in deltas),
            last.finish_reason,
            last.error,
            tuple(entry for delta in deltas for entry in delta.logprobs),
            deltas[0].num_cached_tokens,
        )
