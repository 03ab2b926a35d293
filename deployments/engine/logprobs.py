"""Log-probabilities of the model's own distribution, before anything has changed it.

They are told of the logits as the model gave them: no bias, penalty or temperature is in them. So
it is at OpenAI and, by default, in vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deployments.engine.sampling_params import MAX_NUM_TOP_LOGPROBS


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
        # Summed in float64, a row has the same logarithms alone and in a batch.
        self._logprobs = (
            logits[self._places].double().log_softmax(dim=-1).float() if self._places else None
        )

    def tell(self, token_ids: Sequence[int]) -> dict[int, PositionLogprobs]:
        """Return what was likely, by row, now that these tokens were chosen in the n rows."""
        if self._logprobs is None:
            return {}
        chosen_ids = torch.tensor(
            [token_ids[at] for at in self._places], device=self._logprobs.device
        )
        chosen = self._logprobs.gather(-1, chosen_ids[:, None])[:, 0].tolist()
        top = self._top()
        return {
            at: PositionLogprobs(chosen[i], tuple(top[i][: self._num_top[i]]))
            for i, at in enumerate(self._places)
        }

    def _top(self) -> list[list[tuple[int, float]]]:
        assert self._logprobs is not None
        if not any(self._num_top):
            return [[] for _ in self._places]
        top_ids = _likeliest_ids(self._logprobs)
        values = self._logprobs.gather(-1, top_ids)
        return [
            list(zip(ids, logprobs, strict=True))
            for ids, logprobs in zip(top_ids.tolist(), values.tolist(), strict=True)
        ]


def _likeliest_ids(logprobs: torch.Tensor) -> torch.Tensor:
    """Return the ids of each row's largest values, in order: [n, up to MAX_NUM_TOP_LOGPROBS].

    Models in bfloat16 give many equal logits, and `topk` picks among equals as it likes, which may
    depend on the other rows. So values and ids are packed into integers, of which no two are equal.
    """
    vocab_size = logprobs.shape[-1]
    bits = logprobs.contiguous().view(torch.int32)
    # Positive floats are in the order of their bits; of negative ones all bits but the sign turn.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(vocab_size - 1, -1, -1, device=logprobs.device)
    keys = (ordered << 32) | ids
    largest = keys.topk(min(MAX_NUM_TOP_LOGPROBS, vocab_size), dim=-1).values
    return vocab_size - 1 - (largest & 0xFFFFFFFF)
