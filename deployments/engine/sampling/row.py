"""What the sampler is told of a sequence beside its logits."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from deployments.engine.sampling_params import SamplingParams
from deployments.engine.token_history import TokenHistory

if TYPE_CHECKING:
    import torch

    from deployments.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row of logits becomes a token.

    Attributes:
        params: The sequence's parameters.
        position: The place in the sequence of the token that is to be chosen.
        history: What the penalties look at; needed if the parameters have any.
        barred_token_ids: Tokens that may not be chosen now, all within the vocabulary.
        bitmask: The tokens that a grammar allows (see `GrammarMatcher.bitmask`); None allows all.
    """

    params: SamplingParams
    position: int
    history: TokenHistory | None = None
    barred_token_ids: Collection[int] = ()
    bitmask: "torch.Tensor | None" = None

    @classmethod
    def of(cls, sequence: "Sequence") -> Self:
        """Return how the next token of a sequence is chosen."""
        params, position = sequence.request.params, len(sequence.token_ids)
        barred, matcher = sequence.barred_token_ids, sequence.matcher
        if matcher is None:
            return cls(params, position, sequence.history, barred)
        return cls(params, position, sequence.history, bitmask=matcher.bitmask(barred))

    @property
    def is_adjusted(self) -> bool:
        """Whether the logits change before a token is chosen."""
        return bool(
            self.history
            or self.params.logit_bias
            or self.barred_token_ids
            or self.bitmask is not None
        )
