"""The engine's reports: text deltas of its sequences, and its counters.

A delta carries token ids as well as text, so that the ingress can resume the sequence on another
replica and count tokens exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """The reason why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability.

    Attributes:
        token_id: The token.
        token_bytes: The UTF-8 bytes that the token adds to the text. They may begin or end within a
            character. For a special token, its name, even if the text skips special tokens.
        logprob: At most 0; -inf if the model rules the token out.
    """

    token_id: int
    token_bytes: bytes
    logprob: float

    @property
    def text(self) -> str:
        """The bytes as text, with U+FFFD in place of incomplete characters."""
        return self.token_bytes.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token, and the likeliest tokens at its position in descending order."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The output of a sequence in one engine step, or in several.

    Attributes:
        token_ids: New token ids, in order.
        text: New text that is final. It may be empty while bytes of a character or a possible
            stop string are held back.
        finish_reason: Set only on the last delta.
        error: What went wrong; set with `FinishReason.ERROR`, and with `ABORT` if the whole engine
            has failed.
        logprobs: One for each of `token_ids` if they were requested, else empty. They arrive with
            their ids, even if the text is held back or cut off by a stop string.
        num_cached_tokens: Set only on the first delta: prompt tokens whose keys and values were
            taken from another sequence with the same prefix instead of being computed.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0

    @classmethod
    def join(cls, deltas: Sequence["TextDelta"]) -> "TextDelta":
        """Merge consecutive deltas of one sequence, at least one, into one delta."""
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


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's load and counters between two steps.

    Attributes:
        num_running: Sequences that run.
        num_waiting: Sequences that wait.
        num_steps: Steps that made progress; a step that failed for every sequence does not count.
        num_prompt_tokens: Prompt tokens of all admitted sequences.
        num_cached_tokens: How many of those were taken from other sequences.
        kv_usage: The part of the KV memory that running sequences hold, 0 to 1.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    kv_usage: float = 0.0
