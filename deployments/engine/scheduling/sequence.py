"""A sequence: what the engine runs, from a prompt to its finish reason.

A sequence waits, is prefilled (in one chunk or several), decodes token by token, and finishes. It
may finish from any state: by a stop, by its length, by an abort or by an error. While it runs it
may be preempted: it gives up its slot, waits again and is prefilled with all tokens that it has.

The table below holds every legal transition; any other event raises and changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from deployments.engine.output import FinishReason
from deployments.engine.sampling_params import SamplingParams
from deployments.engine.token_history import TokenHistory

if TYPE_CHECKING:
    import torch

    from deployments.engine.grammar import GrammarMatcher


class SequenceState(StrEnum):
    """Where a sequence stands."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


class SequenceEvent(StrEnum):
    """What can happen to a sequence."""

    ADMIT = "admit"
    PREFILLED = "prefilled"
    PREEMPT = "preempt"
    FINISH = "finish"


TRANSITIONS: Mapping[tuple[SequenceState, SequenceEvent], SequenceState] = MappingProxyType(
    {
        (SequenceState.WAITING, SequenceEvent.ADMIT): SequenceState.PREFILLING,
        (SequenceState.PREFILLING, SequenceEvent.PREFILLED): SequenceState.DECODING,
        (SequenceState.PREFILLING, SequenceEvent.PREEMPT): SequenceState.WAITING,
        (SequenceState.DECODING, SequenceEvent.PREEMPT): SequenceState.WAITING,
        (SequenceState.WAITING, SequenceEvent.FINISH): SequenceState.FINISHED,
        (SequenceState.PREFILLING, SequenceEvent.FINISH): SequenceState.FINISHED,
        (SequenceState.DECODING, SequenceEvent.FINISH): SequenceState.FINISHED,
    }
)


class IllegalTransitionError(RuntimeError):
    """A bug of ours: the event can't happen in this state."""


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """What a sequence is made from.

    Attributes:
        sequence_id: Unique among the sequences that the engine holds.
        prompt_token_ids: The whole prompt, image placeholders included.
        params: Sampling and stopping.
        generated_token_ids: Tokens that were generated elsewhere; generation goes on behind them.
        model_inputs: What the model's processor made of the images, by the names of the model's
            own `forward` arguments. `token_type_ids` and the like are [1, prompt length].
        matcher: The grammar of the parameters, as `Engine.compile_grammar` made it for this one
            sequence; if it is missing, the engine makes it.
    """

    sequence_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    generated_token_ids: tuple[int, ...] = ()
    model_inputs: Mapping[str, "torch.Tensor"] = field(default_factory=dict, repr=False)
    matcher: "GrammarMatcher | None" = field(default=None, repr=False)


class Sequence:
    """The running state of one request.

    Attributes:
        token_ids: Prompt and generated token ids.
        num_computed_tokens: How many of them have their keys and values in the slot.
        num_cached_tokens: How many of the prompt's were taken from another sequence, at admission.
        max_num_tokens: The length at which the sequence ends.
        stop_token_ids: Ids that end it, the model's own included unless they are ignored.
        arrival: Its place among all that were ever added to a scheduler; a lower one is older.
        is_suspect: A step with it failed and could not be run again in parts; until that is cleared
            up, its chunks run in forward passes of their own.
        has_strays: A pass with it failed, and nothing of it has run since: its slot may hold more
            than `num_computed_tokens`, and where slots overwrite, less of what came before.
        history: What its penalties look at; None if it has none.
        matcher: What follows its grammar; None if it has none.
        finish_reason: Set once, with the transition to FINISHED.
        is_sound: Set with it: whether its slot holds what was computed and no more, and all logits
            that this has led to, one row at least, were finite.
    """

    __slots__ = (
        "_state",
        "arrival",
        "finish_reason",
        "has_strays",
        "history",
        "is_sound",
        "is_suspect",
        "matcher",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "request",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self, request: SequenceRequest, *, max_model_len: int, eos_token_ids: frozenset[int]
    ) -> None:
        """Start in WAITING.

        Args:
            request: What to run.
            max_model_len: Most tokens of prompt and answer together.
            eos_token_ids: The model's own end-of-sequence ids.
        """
        params = request.params
        self.request = request
        self.token_ids = [*request.prompt_token_ids, *request.generated_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.max_num_tokens = max_model_len
        if params.max_tokens is not None:
            self.max_num_tokens = min(max_model_len, self.num_prompt_tokens + params.max_tokens)
        # A grammar allows such a token where the text is whole alone, and ends with it.
        ignores_eos = params.ignore_eos and params.grammar is None
        self.stop_token_ids = params.stop_token_ids | (
            frozenset() if ignores_eos else eos_token_ids
        )
        self.arrival = 0
        self.is_suspect = False
        self.has_strays = False
        self.history: TokenHistory | None = None
        if params.has_penalties:
            self.history = TokenHistory(
                request.prompt_token_ids if params.repetition_penalty != 1 else (),
                request.generated_token_ids,
            )
        self.matcher = request.matcher
        self.finish_reason: FinishReason | None = None
        self.is_sound = False
        self._state = SequenceState.WAITING

    @property
    def sequence_id(self) -> str:
        """The request's name for this sequence."""
        return self.request.sequence_id

    @property
    def state(self) -> SequenceState:
        """Where the sequence stands."""
        return self._state

    @property
    def is_divisible(self) -> bool:
        """Whether the prompt may be prefilled in chunks; with images it may not."""
        return not self.request.model_inputs

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def barred_token_ids(self) -> frozenset[int]:
        """Ids that may not come next, because too few tokens were generated to end here."""
        num_generated = len(self.token_ids) - self.num_prompt_tokens
        is_early = num_generated < self.request.params.min_tokens
        return self.stop_token_ids if is_early else frozenset()

    @property
    def grammar_error(self) -> str | None:
        """Why the grammar lets the sequence go no further; None if it does."""
        if self.matcher is None or self.matcher.error is None:
            return None
        return f"the text can't go on as response_format asks: {self.matcher.error}"

    @property
    def num_new_tokens(self) -> int:
        """Tokens that were generated since the request."""
        num_given = self.num_prompt_tokens + len(self.request.generated_token_ids)
        return len(self.token_ids) - num_given

    def admit(self, *, num_cached_tokens: int = 0) -> None:
        """Start to be prefilled, behind as many tokens as stand in the slot already."""
        self.handle(SequenceEvent.ADMIT)
        self.num_computed_tokens = num_cached_tokens
        self.num_cached_tokens = min(num_cached_tokens, self.num_prompt_tokens)

    def handle(self, event: SequenceEvent) -> None:
        """Move to the next state.

        Raises:
            IllegalTransitionError: The event can't happen now; nothing was changed.
        """
        following = TRANSITIONS.get((self._state, event))
        if following is None:
            raise IllegalTransitionError(
                f"sequence {self.sequence_id}: {event} can't happen while {self._state}"
            )
        self._state = following

    def append(self, token_id: int) -> FinishReason | None:
        """Take the next token and say whether it ends the sequence, by itself or by its place."""
        self.token_ids.append(token_id)
        if self.history is not None:
            self.history.add(token_id)
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if self.matcher is not None and self.matcher.advance(token_id):
            return FinishReason.STOP
        if len(self.token_ids) >= self.max_num_tokens:
            return FinishReason.LENGTH
        return None

    def preempt(self) -> None:
        """Wait again; all tokens are to be computed anew."""
        self.handle(SequenceEvent.PREEMPT)
        self.num_computed_tokens = 0
        self.has_strays = False

    def finish(self, reason: FinishReason) -> None:
        """End the sequence for this reason."""
        was_decoding = self._state is SequenceState.DECODING
        self.handle(SequenceEvent.FINISH)
        is_good = reason is not FinishReason.ERROR and not self.has_strays
        self.is_sound = was_decoding and is_good
        self.finish_reason = reason
