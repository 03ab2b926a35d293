"""Attention for decode rows that reads each slot only as far as its sequence goes.

The slots form one long row of tokens, cut at equal distances. A tensor on the device tells torch's
`varlen_attn` how much of each cut is in use. So a captured step needs no mask and reads no padding.
If there are few rows, many of the GPU's processors read parts of a long slot at the same time.

This has not run on a GPU yet. So `can_read_slots` compares its results with masked attention on the
device at hand before it is used. If they differ, or `varlen_attn` is missing, the mask stays.
"""

import logging
from dataclasses import dataclass

import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from deployments.compute.device_errors import is_fatal
from deployments.engine.attention.kv_slots import KVShape

logger = logging.getLogger(__name__)

PROBE_LENGTHS = (1, 77, 2048, 300)
"""Sequence lengths of the comparison; one is long enough to be read in parts."""

TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Allowed difference of outputs, which are averages of numbers around 1, for each dtype that
`varlen_attn` takes."""


@dataclass(frozen=True, slots=True)
class SlotReads:
    """The parts of slots that n rows read in layers of one capacity; row i reads slot i.

    Attributes:
        query_starts: [n + 1], int32: 0, 1, 2, ..., since each row has one query.
        slot_starts: [n + 1], int32, the first token of each slot.
        lengths: [n], int32, how many tokens of its slot each row sees.
        longest: The most tokens that a row can see.
    """

    query_starts: torch.Tensor
    slot_starts: torch.Tensor
    lengths: torch.Tensor
    longest: int

    @classmethod
    def of(cls, lengths: torch.Tensor, capacity: int, longest: int) -> "SlotReads":
        """Return the reads of rows with these lengths: [n], int64, each at least 1."""
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
        return cls(starts, starts * capacity, lengths.clamp(max=longest).int(), longest)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attend with one query per slot.

        Args:
            query: [n, num_heads, head_dim].
            keys: [tokens of all slots, num_kv_heads, head_dim]; more tokens may follow.
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
    """Return whether `SlotReads` gives the same results as masked attention for such heads.

    Raises:
        torch.AcceleratorError: The device failed.
    """
    if device.type != "cuda" or shape.dtype not in TOLERANCE:
        return False
    try:
        error = _error(shape, num_heads, device)
    except Exception as failure:  # after any error, masked attention still works
        if is_fatal(failure):
            raise
        logger.warning("slots are read with a mask: varlen_attn fails here", exc_info=True)
        return False
    if error <= TOLERANCE[shape.dtype]:  # false for NaN
        return True
    logger.warning("slots are read with a mask: varlen_attn is off by %g", error)
    return False


def _error(shape: KVShape, num_heads: int, device: torch.device) -> float:
    """Return the largest difference from masked attention, on random keys and values."""
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
