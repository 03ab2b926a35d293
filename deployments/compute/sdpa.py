"""Scaled dot-product attention, with or without softcapped scores.

Gemma 2 applies a tanh to its scores before the mask and the softmax. torch's kernels can't do that,
so it is written out here, for a part of the queries at a time.
"""

from dataclasses import dataclass

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
    """

    scale: float | None
    softcap: float | None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scores: Scores,
) -> torch.Tensor:
    """Attend like torch's `scaled_dot_product_attention`, with softcapped scores if set.

    Args:
        query: [a, b, m, head_dim].
        key: [a, b, n, head_dim]; may be expanded over b.
        value: As key.
        attn_mask: Bool, True where a query sees a key, broadcast to [a, b, m, n]; None means all.
        is_causal: The first query sees only the first key, each later query one more; needs m = n.
        scores: How scores are computed.

    Returns:
        [a, b, m, head_dim].
    """
    if scores.softcap is None:
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
        output[:, :, rows] = _softcapped(query[:, :, rows], key, value, mask, scale, scores.softcap)
    return output


def _causal_mask(rows: slice, num_keys: int, device: torch.device) -> torch.Tensor:
    keys = torch.arange(num_keys, device=device)
    return keys <= keys[rows, None]


def _mask_of(rows: slice, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the rows' part of a mask; the whole mask if all queries share one row."""
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]


def _softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Attend with all scores in memory, the softmax in float32 as in the stock model.

    Source: transformers, models/gemma2/modeling_gemma2.py, eager_attention_forward.
    """
    scores = _matmul(query, key.mT) * (scale / softcap)
    scores = scores.tanh_().mul_(softcap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
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
