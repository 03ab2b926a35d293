"""The engine's reports: text deltas of its sequences, and its counters.

A delta carries token ids as well as text, so that the ingress can resume the sequence on another
replica and count tokens exactly.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from struct import unpack


class FinishReason(StrEnum):
    """The reason why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    PARKED = "parked"
    """Its replica has given it back to its ingress, which offers it again later."""


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
class PromptLogprobs:
    """The log-probabilities of n consecutive tokens of a prompt, packed: a prompt is long.

    All numbers are little-endian and have four bytes.

    Attributes:
        first: The prompt's first token and its bytes, if it precedes these n. It has no
            log-probability.
        num_top: How many of the likeliest tokens are reported at each position.
        token_ids: [n, 1 + num_top], integers: the prompt's own token, then the likeliest in
            descending order.
        logprobs: [n, 1 + num_top], floats: the natural logarithms of their probabilities.
        ranks: [n], integers: the places of the prompt's own tokens among all tokens by their
            probability, from 1.
        token_bytes: Each token id that occurs, once, with its bytes; see `TokenLogprob`.
    """

    first: tuple[int, bytes] | None
    num_top: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    token_bytes: tuple[tuple[int, bytes], ...]

    def __len__(self) -> int:
        """Return the number of the prompt's tokens, the first included."""
        return len(self.ranks) // 4 + (self.first is not None)

    @property
    def num_entries(self) -> int:
        """How many log-probabilities these are."""
        return len(self.logprobs) // 4

    def positions(self) -> Iterator[tuple[TokenLogprobs, int]]:
        """Yield the log-probabilities of each of the n, and the rank of the prompt's own token."""
        bytes_of = dict(self.token_bytes)
        token_ids = unpack(f"<{self.num_entries}i", self.token_ids)
        logprobs = unpack(f"<{self.num_entries}f", self.logprobs)
        width = 1 + self.num_top
        for at, rank in enumerate(unpack(f"<{len(self.ranks) // 4}i", self.ranks)):
            chosen, *top = (
                TokenLogprob(token_ids[i], bytes_of[token_ids[i]], logprobs[i])
                for i in range(at * width, (at + 1) * width)
            )
            yield TokenLogprobs(chosen, tuple(top)), rank


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The output of a sequence in one engine step, or in several.

    Attributes:
        token_ids: New token ids, in order.
        text: New text that is final. It may be empty while bytes of a character or a possible
            stop string are held back.
        finish_reason: Set only on the last delta.
        error: What went wrong; set with `FinishReason.ERROR`, and with `ABORT` if the whole engine
            has failed. An ingress's streams raise both; there it is set on the last delta before
            the error of a sequence that has failed.
        logprobs: One for each of `token_ids` if they were requested, else empty. They arrive with
            their ids, even if the text is held back or cut off by a stop string.
        num_cached_tokens: Set only on the answer's first delta: prompt tokens whose keys and values
            were taken from another sequence with the same prefix instead of being computed.
        stop: Set only on the last delta: the stop string that ended the text, if one did.
        begun_s: Set only on the answer's first delta, and not sent to the ingress: when the engine
            began with the sequence, by the process's monotonic clock.
        prompt_logprobs: The log-probabilities of the prompt's next tokens, if they were requested.
            They come in deltas of their own, before the answer's first.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    stop: str | None = None
    begun_s: float | None = field(default=None, compare=False)
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()

    @classmethod
    def join(cls, deltas: Sequence["TextDelta"]) -> "TextDelta":
        """Merge consecutive deltas of one sequence, at least one, into one delta."""
        if len(deltas) == 1:
            return deltas[0]
        last = deltas[-1]
        first = next((delta for delta in deltas if not delta.prompt_logprobs), last)
        return cls(
            tuple(token_id for delta in deltas for token_id in delta.token_ids),
            "".join(delta.text for delta in deltas),
            last.finish_reason,
            last.error,
            tuple(entry for delta in deltas for entry in delta.logprobs),
            first.num_cached_tokens,
            last.stop,
            first.begun_s,
            tuple(part for delta in deltas for part in delta.prompt_logprobs),
        )


class Delivered:
    """What has gone out of a text, so that it can go on elsewhere after that.

    Attributes:
        token_ids: The answer's token ids.
        num_prompt_logprobs: How many of the prompt's log-probabilities.
        num_gained: How many of the ids have come since the latest `begin_run`.
    """

    def __init__(
        self,
        token_ids: Iterable[int] = (),
        num_prompt_logprobs: int = 0,
        *,
        has_told_cached: bool = False,
    ) -> None:
        """Start with what went out before; `begin_run` comes next.

        Args:
            token_ids: Ids that went out before.
            num_prompt_logprobs: Log-probabilities of the prompt that did.
            has_told_cached: Whether it was told, too, how much of the prompt was cached.
        """
        self.token_ids = list(token_ids)
        self.num_prompt_logprobs = num_prompt_logprobs
        self.num_gained = 0
        self._has_told_cached = has_told_cached
        self._has_sent = False

    def begin_run(self) -> None:
        """Note that what comes from here on comes from another replica, or again from an engine."""
        self.num_gained = 0
        self._has_told_cached = self._has_told_cached or self._has_sent

    def add(self, delta: TextDelta) -> TextDelta:
        """Count a delta in; return it without what an earlier run has told already."""
        if self._has_told_cached and delta.num_cached_tokens:
            delta = replace(delta, num_cached_tokens=0)
        self._has_sent = True
        self.token_ids += delta.token_ids
        self.num_gained += len(delta.token_ids)
        if delta.prompt_logprobs:
            self.num_prompt_logprobs += sum(map(len, delta.prompt_logprobs))
        return delta


@dataclass(slots=True)
class SequenceJournal:
    """When things happened to one sequence, for its trace; in Unix nanoseconds.

    The engine's thread writes it, and it is read once the sequence has ended.

    Attributes:
        begun_ns: When the sequence began to run for the first time; None until then.
        preempted_ns: When it gave up its memory, and waited again.
    """

    begun_ns: int | None = None
    preempted_ns: list[int] = field(default_factory=list)

    def note_begun(self, at_ns: int) -> None:
        """Note that an engine begins with it; only the first time counts."""
        if self.begun_ns is None:
            self.begun_ns = at_ns


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
        num_preempted: How often a sequence has given up its memory to wait again.
        num_resumed: Sequences that another engine had accepted, and this one has gone on with.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    kv_usage: float = 0.0
    num_preempted: int = 0
    num_resumed: int = 0
