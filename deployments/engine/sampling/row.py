"""The sampler's input for one sequence, besides its logits."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from deployments.contract.sampling_params import SamplingParams
from deployments.engine.scheduling.token_counts import TokenCounts

if TYPE_CHECKING:
    import torch

    from deployments.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """The settings for turning one row of logits into a token.

    Attributes:
        params: The sequence's parameters.
        position: Position in the sequence of the token to be chosen.
        token_counts: Token counts for the penalties; needed only if the parameters set a penalty.
        barred_token_ids: Tokens that may not be chosen now; all are in the vocabulary.
        bitmask: Tokens that a grammar allows (see `GrammarMatcher.bitmask`); None allows all.
    """

    params: SamplingParams
    position: int
    token_counts: TokenCounts | None = None
    barred_token_ids: Collection[int] = ()
    bitmask: "torch.Tensor | None" = None

    @classmethod
    def of(cls, sequence: "Sequence") -> Self:
        """Return how to choose the next token of a sequence."""
        params, position = sequence.request.params, len(sequence.token_ids)
        barred, matcher = sequence.barred_token_ids, sequence.matcher
        if matcher is None:
            return cls(params, position, sequence.token_counts, barred)
        return cls(params, position, sequence.token_counts, bitmask=matcher.bitmask(barred))

    @property
    def is_adjusted(self) -> bool:
        """Whether the logits change before a token is chosen."""
        return bool(
            self.token_counts
            or self.params.logit_bias
            or self.barred_token_ids
            or self.bitmask is not None
        )
