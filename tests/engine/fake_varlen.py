"""torch's flash attention over sequences of any lengths, computed on a CPU by other operators."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from deployments.engine.attention import varlen_reads


class FakeVarlen:
    """Stands in for `varlen_reads.flash_attention`, for one query per sequence.

    As in torch, sequence i has `seqused_k[i]` keys from `cum_seq_k[i]` on, and the host never reads
    a tensor's contents.

    Attributes:
        num_calls: The number of calls.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls = 0
        monkeypatch.setattr(varlen_reads, "flash_attention", self)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cum_seq_q: torch.Tensor,
        cum_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        seqused_k: torch.Tensor,
    ) -> torch.Tensor:
        self.num_calls += 1
        assert max_q == 1
        assert cum_seq_q.dtype == cum_seq_k.dtype == seqused_k.dtype == torch.int32
        num_rows, num_heads, _ = query.shape
        assert cum_seq_q.shape == cum_seq_k.shape == (num_rows + 1,)
        assert seqused_k.shape == (num_rows,)
        assert num_heads % key.shape[1] == 0
        within = torch.arange(max_k, device=query.device)
        places = (cum_seq_k[:-1, None] + within).clamp(max=len(key) - 1).flatten()
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
