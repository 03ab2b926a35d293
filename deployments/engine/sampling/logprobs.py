"""Log-probabilities of the model's own distribution, before anything has changed it.

They are told of the logits as the model gave them: no bias, penalty or temperature is in them. So
it is at OpenAI and, by default, in vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deployments.engine.blocks import sums_of_rows
from deployments.engine.host_copy import take_rows, to_device
from deployments.engine.largest import find_largest


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """What was likely at one position.

    Attributes:
        chosen: Natural logarithm of the chosen token's probability.
        top: Token ids and their log-probabilities, the likeliest first; the chosen one is among
            them only if it is as likely. Of two that are equally likely the lower id comes first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


class RawLogprobs:
    """The distributions of the rows that are to be told, kept before the logits change."""

    def __init__(self, logits: torch.Tensor, num_top: Sequence[int | None]) -> None:
        """Copy what is needed.

        Args:
            logits: [n, vocab], float32, on the model's device.
            num_top: How many of the likeliest tokens to tell in each of the n rows; None for a
                row of which nothing is told.
        """
        self._places = [at for at, num in enumerate(num_top) if num is not None]
        self._num_top = [num for num in num_top if num is not None]
        self._logits = take_rows(logits, self._places) if self._places else logits[:0]

    def tell(self, token_ids: Sequence[int]) -> dict[int, PositionLogprobs]:
        """Return what was likely, by row, now that these tokens were chosen in the n rows."""
        if not self._places:
            return {}
        device = self._logits.device
        chosen = to_device([token_ids[at] for at in self._places], device, torch.int64)
        num_top = min(max(self._num_top), self._logits.shape[-1])
        asked = chosen[:, None]
        if num_top:
            asked = torch.cat([asked, find_largest(self._logits, num_top)], dim=-1)
        logprobs = self._logprobs_of(asked).tolist()
        told = {}
        for at, num, ids, values in zip(
            self._places, self._num_top, asked.tolist(), logprobs, strict=True
        ):
            top = tuple(zip(ids[1 : num + 1], values[1 : num + 1], strict=True))
            told[at] = PositionLogprobs(values[0], top)
        return told

    def _logprobs_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of [m, k] tokens: [m, k], float32."""
        maxima = self._logits.amax(dim=-1, keepdim=True)
        totals = sums_of_rows((self._logits - maxima).exp_())[:, None]
        logits = self._logits.gather(-1, token_ids).double()
        return (logits - maxima - totals.log()).float()
