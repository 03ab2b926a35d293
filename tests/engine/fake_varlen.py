"""torch's `varlen_attn` as documented, computed on a CPU by other operators."""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention


class FakeVarlen:
    """Stands in for `torch.nn.attention.varlen.varlen_attn`, for one query per sequence.

    As in torch, sequence i has `seqused_k[i]` keys from `cu_seq_k[i]` on, and the host never reads
    a tensor's contents.

    Attributes:
        num_calls: The number of calls.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls = 0
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", self)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        seqused_k: torch.Tensor,
        **others: Any,
    ) -> torch.Tensor:
        assert not others
        self.num_calls += 1
        assert max_q == 1
        assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == torch.int32
        num_rows, num_heads, _ = query.shape
        assert cu_seq_q.shape == cu_seq_k.shape == (num_rows + 1,)
        assert seqused_k.shape == (num_rows,)
        assert enable_gqa or num_heads == key.shape[1]
        within = torch.arange(max_k, device=query.device)
        places = (cu_seq_k[:-1, None] + within).clamp(max=len(key) - 1).flatten()
        keys, values = (
            tokens.index_select(0, places).view(num_rows, max_k, *tokens.shape[1:]).transpose(1, 2)
            for tokens in (key, value)
        )
        output = scaled_dot_product_attention(
            query[:, :, None],
            keys.repeat_interleave(num_heads // key.shape[1], dim=1),
            values.repeat_interleave(num_heads // key.shape[1], dim=1),
            attn_mask=(within < seqused_k[:, None])[:, None, None],
            scale=scale,
        )
        return output[:, :, 0]
