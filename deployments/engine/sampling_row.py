"""What the sampler is told of a sequence beside its logits."""

from collections.abc import Collection
from dataclasses import dataclass

from deployments.engine.sampling_params import SamplingParams
from deployments.engine.token_history import TokenHistory


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row of logits becomes a token.

    Attributes:
        params: The sequence's parameters.
        position: The place in the sequence of the token that is to be chosen.
        history: What the penalties look at; needed if the parameters have any.
        barred_token_ids: Tokens that may not be chosen now, all within the vocabulary.
    """

    params: SamplingParams
    position: int
    history: TokenHistory | None = None
    barred_token_ids: Collection[int] = ()

    @property
    def is_adjusted(self) -> bool:
        """Whether the logits change before a token is chosen."""
        return bool(self.history or self.params.logit_bias or self.barred_token_ids)
