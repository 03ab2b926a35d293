"""Scaled dot-product attention, with or without softcapped scores and attention sinks.

Gemma 2 applies a tanh to its scores before the mask and the softmax. gpt-oss has attention sinks: a
learned score for each head, which takes part in the softmax and has no value. torch's kernels can't
do either, so both are written out here, for a part of the queries at a time.
"""

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention

MAX_SCORES = 2**22
"""Scores in memory at once, over all heads; a long prefill is computed in parts of this many."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The computation of scores from queries and keys.

    Attributes:
        scale: Factor on the products; None means head_dim ** -0.5.
        softcap: Bound of the scores; None means no bound.
        sinks: [num_heads], float32, one more score of each query head, whose weight is dropped;
            None means none.
    """

    scale: float | None
    softcap: float | None
    sinks: torch.Tensor | None = None

    def ready(self) -> "Scores":
        """Return the same with the sinks, which a model may hold in another dtype, as float32."""
        if self.sinks is None:
            return self
        return replace(self, sinks=self.sinks.detach().float().contiguous())

    def grouped(self, *size: int) -> "Scores":
        """Return the same with the sinks as a tensor of this size, for `attend`."""
        if self.sinks is None:
            return self
        return replace(self, sinks=self.sinks.view(size))

    @property
    def is_plain(self) -> bool:
        """Whether torch's kernels can compute the scores."""
        return self.softcap is None and self.sinks is None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scores: Scores,
) -> torch.Tensor:
    """Attend like torch's `scaled_dot_product_attention`, with softcap and sinks if set.

    Args:
        query: [a, b, m, head_dim].
        key: [a, b, n, head_dim]; may be expanded over b.
        value: As key.
        attn_mask: Bool, True where a query sees a key, broadcast to [a, b, m, n]; None means all.
        is_causal: The first query sees only the first key, each later query one more; needs m = n.
        scores: How scores are computed; its sinks, if any, are broadcast to [a, b, m].

    Returns:
        [a, b, m, head_dim].
    """
    if scores.is_plain:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scores.scale
        )
    num_groups, num_queries, head_dim = query.shape[1:]
    num_keys = key.shape[-2]
    scale = head_dim**-0.5 if scores.scale is None else scores.scale
    num_rows = max(1, MAX_SCORES // (query.shape[0] * num_groups * num_keys))
    output = torch.empty_like(query)
    for start in range(0, num_queries, num_rows):
        rows = slice(start, min(start + num_rows, num_queries))
        if is_causal:
            mask: torch.Tensor | None = _causal_mask(rows, num_keys, query.device)
        else:
            mask = _mask_of(rows, attn_mask)
        sinks = None if scores.sinks is None else scores.sinks.expand(query.shape[:-1])[..., rows]
        output[:, :, rows] = _attend_written_out(
            query[:, :, rows], key, value, mask, scale, scores.softcap, sinks
        )
    return output


def _causal_mask(rows: slice, num_keys: int, device: torch.device) -> torch.Tensor:
    keys = torch.arange(num_keys, device=device)
    return keys <= keys[rows, None]


def _mask_of(rows: slice, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the rows' part of a mask; the whole mask if all queries share one row."""
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]


def _attend_written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with all scores in memory, the softmax in float32.

    Source: transformers, models/gemma2/modeling_gemma2.py and models/gpt_oss/modeling_gpt_oss.py,
    eager_attention_forward.
    """
    scores = _matmul(query, key.mT) * (scale if softcap is None else scale / softcap)
    if softcap is not None:
        scores = scores.tanh_().mul_(softcap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores.float(), sinks[..., None]], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[-2]].to(query.dtype)
    return _matmul(weights, value)


def _matmul(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiply [a, b, m, k] by [a, b, k, n] without copying the second.

    torch would copy it to join the dimensions a and b: a KV cache stores keys token by token, and
    the keys of a prefill are one matrix expanded over b.
    """
    if matrices.stride(1) == 0:
        product = rows.flatten(1, 2) @ matrices[:, 0]
        return product.view(*rows.shape[:3], matrices.shape[-1])
    return torch.stack([rows[:, i] @ matrices[:, i] for i in range(rows.shape[1])], dim=1)


def disable_cudnn_attention(device: torch.device) -> None:
    """Keep torch from choosing cuDNN's attention on a GPU, in the whole process.

    On a Hopper or Blackwell GPU torch prefers cuDNN's kernel, which plans each new shape on the
    host for tens of milliseconds. Prompts and batches have new shapes all the time. The other
    kernels take any shape without planning.

    Source: torch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
    check_prefer_cudnn_attention; aten/src/ATen/native/cudnn/MHA.cpp, MHAParams.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    is_causal: bool,
    scale: float | None,
    window_size_left: int | None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call the operator beneath `torch.nn.attention.varlen.varlen_attn`, by its own names.

    `varlen_attn` itself takes lengths and fewer heads of keys only from torch 2.12 on, and fills a
    tensor in each call that nobody reads. The operator has taken both since torch 2.11.

    Args:
        query: [m, num_heads, head_dim].
        key: [tokens, num_kv_heads, head_dim].
        value: As key.
        cum_seq_q: [n + 1], int32, the first query of each sequence, and the number of queries.
        cum_seq_k: [n + 1], int32, the first key of each sequence.
        max_q: The most queries of a sequence.
        max_k: The most keys of a sequence.
        is_causal: Whether the last query sees all keys, and each earlier one a key less.
        scale: Factor on the scores; None means head_dim ** -0.5.
        window_size_left: Keys before its own that a query sees; None means all.
        window_size_right: Keys after its own that a query sees, unless `is_causal`; None means all.
        seqused_k: [n], int32, how many keys each sequence has; None: all up to the next one's.

    Returns:
        [m, num_heads, head_dim].

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
        is_causal,
        False,  # debug mask
        scale=scale,
        window_size_left=window_size_left,
        window_size_right=window_size_right,
        seqused_k=seqused_k,
    )[0]
    return output
