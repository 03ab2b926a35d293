"""Attention of decode rows that reads each slot just as far as its sequence goes.

The slots are one long row of tokens, cut at equal distances, and torch's `varlen_attn` is told on
the device how much of each cut is in use. So a captured step needs no mask and reads nothing in
vain; and where rows are few, a long slot is read in parts by many of the GPU's processors at once.

Not seen on a GPU yet. So before it is used it has to give what attention with a mask gives, here
and now (`can_read_slots`); where it does not, or is not there, the mask stays.
"""

import logging
from dataclasses import dataclass

import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from deployments.engine.device_errors import is_fatal
from deployments.engine.kv_slots import KVShape

logger = logging.getLogger(__name__)

PROBE_LENGTHS = (1, 77, 2048, 300)
"""Of the sequences that both ways of attending are compared on: long enough to be read in parts."""

TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Of outputs that are averages of numbers around 1, by the types that `varlen_attn` takes."""


@dataclass(frozen=True, slots=True)
class SlotReads:
    """How far n rows read their slots in layers of one capacity; row i reads slot i.

    Attributes:
        query_starts: [n + 1], int32: 0, 1, 2, ..., since each row has one query.
        slot_starts: [n + 1], int32, the first token of each slot.
        lengths: [n], int32, how many tokens of its slot each row sees.
        longest: No row sees more.
    """

    query_starts: torch.Tensor
    slot_starts: torch.Tensor
    lengths: torch.Tensor
    longest: int

    @classmethod
    def of(cls, lengths: torch.Tensor, capacity: int, longest: int) -> "SlotReads":
        """Return the reads of rows with these lengths, [n], int64, each 1 or more."""
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
        return cls(starts, starts * capacity, lengths.clamp(max=longest).int(), longest)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attend with one query per slot.

        Args:
            query: [n, num_heads, head_dim].
            keys: [tokens of all slots, num_kv_heads, head_dim]; more may stand behind them.
            values: As keys.
            scale: Factor on the scores; None means head_dim ** -0.5.

        Returns:
            [n, num_heads, head_dim].
        """
        output = varlen.varlen_attn(
            query,
            keys,
            values,
            self.query_starts,
            self.slot_starts,
            1,
            self.longest,
            scale=scale,
            enable_gqa=True,
            seqused_k=self.lengths,
        )
        assert isinstance(output, torch.Tensor)
        return output


@torch.inference_mode()
def can_read_slots(shape: KVShape, num_heads: int, device: torch.device) -> bool:
    """Return whether such heads are attended to by `SlotReads` as they are with a mask.

    Raises:
        torch.AcceleratorError: The device is gone. Without captured steps it would not be asked.
    """
    if device.type != "cuda" or shape.dtype not in TOLERANCE:
        return False
    try:
        error = _error(shape, num_heads, device)
    except Exception as failure:  # whatever it is, attention with a mask does without
        if is_fatal(failure):
            raise
        logger.warning("slots are read with a mask: varlen_attn fails here", exc_info=True)
        return False
    if error <= TOLERANCE[shape.dtype]:  # NaN is not
        return True
    logger.warning("slots are read with a mask: varlen_attn is off by %g", error)
    return False


def _error(shape: KVShape, num_heads: int, device: torch.device) -> float:
    """Return the largest difference between both ways, on random keys and values."""
    num_rows, capacity = len(PROBE_LENGTHS), max(PROBE_LENGTHS)
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        numbers = torch.randn(*size, shape.head_dim, generator=generator, device=device)
        return numbers.to(shape.dtype)

    query = random(num_rows, num_heads)
    keys, values = (random(num_rows * capacity + 1, shape.num_kv_heads) for _ in range(2))
    lengths = torch.tensor(PROBE_LENGTHS, device=device)
    found = SlotReads.of(lengths, capacity, capacity).attend(query, keys, values, None)
    grouped = query.view(num_rows, shape.num_kv_heads, -1, shape.head_dim).float()
    slot_keys, slot_values = (
        tokens[:-1].view(num_rows, capacity, *tokens.shape[1:]).transpose(1, 2).float()
        for tokens in (keys, values)
    )
    seen = torch.arange(capacity, device=device) < lengths[:, None]
    expected = scaled_dot_product_attention(
        grouped, slot_keys, slot_values, attn_mask=seen[:, None, None]
    )
    return (found.float() - expected.flatten(1, 2)).abs().max().item()
