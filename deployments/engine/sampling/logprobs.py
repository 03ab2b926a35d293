"""Log-probabilities of the model's own distribution, before anything changes it.

They come from the logits as the model gave them, without bias, penalty or temperature. OpenAI does
the same, and vLLM by default.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deployments.compute.host_to_device import take_rows, to_device
from deployments.engine.sampling.block_reductions import sums_of_rows
from deployments.engine.sampling.stable_top_k import stable_top_k


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The log-probabilities at one position.

    Attributes:
        chosen: Natural logarithm of the chosen token's probability.
        top: The likeliest token ids and their log-probabilities, likeliest first. The chosen token
            is among them only if it is likely enough. Of equally likely tokens, the lower id comes
            first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


class RawLogprobs:
    """The logits of the rows that report log-probabilities, copied before they change."""

    def __init__(self, logits: torch.Tensor, num_top: Sequence[int | None]) -> None:
        """Copy the logits of the rows that report log-probabilities.

        Args:
            logits: [n, vocab], float32, on the model's device.
            num_top: How many of the likeliest tokens to report for each of the n rows; None for a
                row that reports nothing.
        """
        self._places = [at for at, num in enumerate(num_top) if num is not None]
        self._num_top = [num for num in num_top if num is not None]
        self._logits = take_rows(logits, self._places) if self._places else logits[:0]

    def of_tokens(self, token_ids: Sequence[int]) -> dict[int, PositionLogprobs]:
        """Return the log-probabilities by row, given the tokens chosen in the n rows."""
        if not self._places:
            return {}
        device = self._logits.device
        chosen = to_device([token_ids[at] for at in self._places], device, torch.int64)
        num_top = min(max(self._num_top), self._logits.shape[-1])
        asked = chosen[:, None]
        if num_top:
            asked = torch.cat([asked, stable_top_k(self._logits, num_top)], dim=-1)
        logprobs = self._logprobs_of(asked).tolist()
        found = {}
        for at, num, ids, values in zip(
            self._places, self._num_top, asked.tolist(), logprobs, strict=True
        ):
            top = tuple(zip(ids[1 : num + 1], values[1 : num + 1], strict=True))
            found[at] = PositionLogprobs(values[0], top)
        return found

    def _logprobs_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of [m, k] tokens: [m, k], float32."""
        maxima = self._logits.amax(dim=-1, keepdim=True)
        totals = sums_of_rows((self._logits - maxima).exp_())[:, None]
        logits = self._logits.gather(-1, token_ids).double()
        return (logits - maxima - totals.log()).float()
