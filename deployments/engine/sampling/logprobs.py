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

MAX_BLOCK_LOGITS = 2**21
"""Logits of prompt rows that are looked at together; each takes up to four floats meanwhile."""


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
        asked, logprobs = self._of(chosen)
        return self._by_row(asked.tolist(), logprobs.tolist())

    def on_device(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return what `read` takes, given the tokens chosen in the n rows: [2, m, k], float64."""
        if not self._places:
            return self._logits.new_empty(2, 0, 0, dtype=torch.float64)
        asked, logprobs = self._of(take_rows(token_ids, self._places))
        return torch.stack((asked.double(), logprobs.double()))

    def read(self, numbers: Sequence[float]) -> dict[int, PositionLogprobs]:
        """Return the log-probabilities by row from the numbers of `on_device`, flat."""
        if not self._places:
            return {}
        width = len(numbers) // (2 * len(self._places))
        rows = [numbers[at : at + width] for at in range(0, len(numbers), width)]
        asked = [list(map(int, row)) for row in rows[: len(self._places)]]
        return self._by_row(asked, rows[len(self._places) :])

    def _of(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids, int64, and log-probabilities, float32, of the m rows' tokens: [m, k] each.

        Args:
            chosen: [m], int64, the token of each row that reports.
        """
        num_top = min(max(self._num_top), self._logits.shape[-1])
        asked = chosen[:, None]
        if num_top:
            asked = torch.cat([asked, stable_top_k(self._logits, num_top)], dim=-1)
        return asked, _logprobs_of(self._logits, asked)

    def _by_row(
        self, asked: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]
    ) -> dict[int, PositionLogprobs]:
        found = {}
        for at, num, ids, values in zip(self._places, self._num_top, asked, logprobs, strict=True):
            top = tuple(zip(ids[1 : num + 1], values[1 : num + 1], strict=True))
            found[at] = PositionLogprobs(values[0], top)
        return found


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The log-probabilities of n consecutive tokens of a prompt, as tensors on the host.

    Attributes:
        token_ids: [n, 1 + k], int32: the prompt's own token, then the k likeliest, likeliest first.
        logprobs: [n, 1 + k], float32.
        ranks: [n], int32: the place of the prompt's own token among all tokens, from 1.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


def score_prompt(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> PromptScores:
    """Return the log-probabilities of a prompt's tokens.

    Args:
        logits: [n, vocab], in the model's dtype, on its device: those of the rows before the
            tokens.
        token_ids: The n tokens.
        num_top: How many of the likeliest tokens to report at each position.

    Raises:
        ValueError: A row has no probabilities: one of its logits is NaN or +inf, or all are -inf.
    """
    num_top = min(num_top, logits.shape[-1])
    if not token_ids:
        none = torch.empty(0, 1 + num_top)
        return PromptScores(none.int(), none, none[:, 0].int())
    own = to_device(token_ids, logits.device, torch.int64)[:, None]
    num_rows = max(1, MAX_BLOCK_LOGITS // logits.shape[-1])
    blocks = zip(torch.split(logits, num_rows), torch.split(own, num_rows), strict=True)
    parts = [_score(block.float(), tokens, num_top) for block, tokens in blocks]
    scores = PromptScores(*(torch.cat(each).cpu() for each in zip(*parts, strict=True)))
    if scores.logprobs.isnan().any():
        raise ValueError("the logits of a prompt's token are not finite")
    return scores


def _score(
    logits: torch.Tensor, own: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the parts of `PromptScores` for logits [m, vocab], float32, and tokens [m, 1]."""
    asked = own
    if num_top:
        asked = torch.cat([own, stable_top_k(logits, num_top)], dim=-1)
    of_own = logits.gather(-1, own)
    # Of equal logits, the one with the lower id counts as the larger, as everywhere.
    lower_ids = torch.arange(logits.shape[-1], device=logits.device) < own
    num_before = ((logits > of_own) | ((logits == of_own) & lower_ids)).sum(dim=-1)
    return asked.int(), _logprobs_of(logits, asked), (1 + num_before).int()


def _logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of tokens [m, k] by logits [m, vocab]: [m, k], float32."""
    maxima = logits.amax(dim=-1, keepdim=True)
    totals = sums_of_rows((logits - maxima).exp_())[:, None]
    return (logits.gather(-1, token_ids).double() - maxima - totals.log()).float()
