"""Attention for decode rows that reads each extent only as far as its sequence goes.

A layer is one long row of tokens. Two tensors on the device tell torch's flash attention where each
row's extent starts and how much of it is in use. So a captured step needs no mask and reads no
padding. If there are few rows, many of the GPU's processors read parts of a long extent at the same
time.

Flash attention is documented for starts that ascend; what it does with gaps between the extents, or
with starts in another order, its documentation does not say. So `can_read_extents` compares its
results with masked attention on the device at hand before it is used. If they differ, or the
operator is missing, the mask stays.
"""

import logging
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from deployments.compute.device_errors import is_fatal
from deployments.engine.attention.decode_spans import DecodeSpan
from deployments.engine.attention.kv_cache import KVShape

logger = logging.getLogger(__name__)

PROBE_LENGTHS = (1, 77, 2048, 300)
"""Sequence lengths of the comparison; one is long enough to be read in parts."""

PROBE_EXTENT = 2304
"""Tokens from one extent's start to the next in the comparison."""

TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Allowed difference of outputs, which are averages of numbers around 1, for each dtype that
flash attention takes."""


@dataclass(frozen=True, slots=True)
class ExtentReads:
    """The parts of extents that n rows read in layers of one capacity.

    Attributes:
        query_starts: [n + 1], int32: 0, 1, 2, ..., since each row has one query.
        starts: [n + 1], int32, the first token of each row's extent, and any other token.
        lengths: [n], int32, how many tokens from there each row sees.
        longest: The most tokens that a row can see.
    """

    query_starts: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    longest: int

    @classmethod
    def of(
        cls, starts: torch.Tensor, lengths: torch.Tensor, spare_token: int, longest: int
    ) -> "ExtentReads":
        """Return the reads of n rows.

        Args:
            starts: [n], int64, the first token of each row's extent.
            lengths: [n], int64, the length of each row's sequence, at least 1.
            spare_token: The token after all extents.
            longest: The most tokens that a row can see.
        """
        query_starts = torch.arange(len(starts) + 1, dtype=torch.int32, device=starts.device)
        ended = torch.nn.functional.pad(starts, (0, 1), value=spare_token)
        return cls(query_starts, ended.int(), lengths.clamp(max=longest).int(), longest)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attend with one query per row.

        Args:
            query: [n, num_heads, head_dim].
            keys: [tokens of the layer, num_kv_heads, head_dim].
            values: As keys.
            scale: Factor on the scores; None means head_dim ** -0.5.

        Returns:
            [n, num_heads, head_dim].
        """
        return flash_attention(
            query,
            keys,
            values,
            self.query_starts,
            self.starts,
            1,
            self.longest,
            scale=scale,
            seqused_k=self.lengths,
        )


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    seqused_k: torch.Tensor,
) -> torch.Tensor:
    """Call the operator beneath `torch.nn.attention.varlen.varlen_attn`, by its own names.

    `varlen_attn` itself takes lengths and fewer heads of keys only from torch 2.12 on, and fills a
    tensor in each call that nobody reads. The operator has taken both since torch 2.11.

    Args:
        query: [n, num_heads, head_dim].
        key: [tokens, num_kv_heads, head_dim].
        value: As key.
        cum_seq_q: [n + 1], int32, the first query of each sequence.
        cum_seq_k: [n + 1], int32, the first key of each sequence.
        max_q: The most queries of a sequence.
        max_k: The most keys of a sequence.
        scale: Factor on the scores; None means head_dim ** -0.5.
        seqused_k: [n], int32, how many keys each sequence has.

    Returns:
        [n, num_heads, head_dim].

    Source: torch, aten/src/ATen/native/native_functions.yaml, _flash_attention_forward.
    """
    output: torch.Tensor = torch.ops.aten._flash_attention_forward.default(
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        0.0,  # dropout
        False,  # causal: each sequence has one query, which sees all its keys
        False,  # debug mask
        scale=scale,
        seqused_k=seqused_k,
    )[0]
    return output


@torch.inference_mode()
def can_read_extents(
    shape: KVShape, num_heads: int, device: torch.device, *, is_sorted: bool
) -> bool:
    """Return whether `ExtentReads` gives the same results as masked attention for such heads.

    Args:
        shape: The keys and values.
        num_heads: Heads of queries.
        device: The model's device.
        is_sorted: Whether the starts of a step's extents always ascend.

    Raises:
        torch.AcceleratorError: The device failed.
    """
    if device.type != "cuda" or shape.dtype not in TOLERANCE:
        return False
    orders = [range(len(PROBE_LENGTHS))]
    if not is_sorted:
        orders.append(orders[0][::-1])
    try:
        for order in orders:
            error = _error(shape, num_heads, device, order)
            if not error <= TOLERANCE[shape.dtype]:  # true for NaN
                logger.warning("extents are read with a mask: flash attention is off by %g", error)
                return False
    except Exception as failure:  # after any error, masked attention still works
        if is_fatal(failure):
            raise
        logger.warning("extents are read with a mask: flash attention fails here", exc_info=True)
        return False
    return True


def _error(shape: KVShape, num_heads: int, device: torch.device, order: range) -> float:
    """Return the largest difference from masked attention, on random keys and values.

    Args:
        shape: The keys and values.
        num_heads: Heads of queries.
        device: The model's device.
        order: For each row, how many extents are before its own. Tokens of no row are NaN.
    """
    num_rows, spare_token = len(order), len(order) * PROBE_EXTENT
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        numbers = torch.randn(*size, shape.head_dim, generator=generator, device=device)
        return numbers.to(shape.dtype)

    query = random(num_rows, num_heads)
    keys, values = (random(spare_token + 1, shape.num_kv_heads) for _ in range(2))
    lengths = torch.tensor(PROBE_LENGTHS, device=device)
    starts = torch.tensor(order, device=device) * PROBE_EXTENT
    span = DecodeSpan.gathered(slice(0, num_rows), starts, lengths, max(PROBE_LENGTHS))
    is_unread = torch.ones(len(keys), dtype=torch.bool, device=device)
    is_unread[span.tokens] = False
    for stored in (keys, values):
        stored.masked_fill_(is_unread[:, None, None], torch.nan)
    reads = ExtentReads.of(starts, lengths, spare_token, max(PROBE_LENGTHS))
    found = reads.attend(query, keys, values, None)
    grouped = query.view(num_rows, shape.num_kv_heads, -1, shape.head_dim).float()
    own_keys, own_values = (span.read(stored).float() for stored in (keys, values))
    expected = scaled_dot_product_attention(grouped, own_keys, own_values, attn_mask=span.mask)
    return (found.float() - expected.flatten(1, 2)).abs().max().item()
