"""torch's flash attention over sequences of any lengths, computed on a CPU by other operators.

It refuses what `mha_varlen_fwd` refuses, so that a step that would raise on a GPU raises here.

Source: torch, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd.
"""

from types import ModuleType

import pytest
import torch

from deployments.engine.attention import varlen_reads
from deployments.plan.model_shape import FLASH_HEAD_DIM_STEP, MAX_FLASH_HEAD_DIM

DTYPES = (torch.float16, torch.bfloat16)


class FakeVarlen:
    """Stands in for `sdpa.flash_attention` in the module that calls it.

    As in torch, sequence i has `seqused_k[i]` keys from `cum_seq_k[i]` on, or all up to those of
    the next one, its queries are the last of them, and the host never reads a tensor's contents.
    Keys that a query does not see have no effect, NaN or not. The result of a query is NaN if a key
    is outside of the memory, or if there are `max_q` queries of its sequence before it: torch's
    kernels do not reach it.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *dtypes: torch.dtype,
        device: str | None = None,
        module: ModuleType = varlen_reads,
    ) -> None:
        """Replace the operator in a module; accept `dtypes` besides those of flash attention.

        All tensors must be on a device of type `device`; None for any.
        """
        self.num_calls = 0  # the number of calls
        self.starts = torch.empty(0)  # the starts of the latest call
        self._dtypes = (*DTYPES, *dtypes)
        self._device = device
        monkeypatch.setattr(module, "flash_attention", self)

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
        is_causal: bool,
        scale: float | None,
        window_size_left: int | None,
        window_size_right: int | None = None,
        seqused_k: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.num_calls += 1
        self.starts = cum_seq_k[:-1]
        if seqused_k is None:
            seqused_k = cum_seq_k.diff()
        self._check(query, key, value, cum_seq_q, cum_seq_k, seqused_k)
        assert type(max_q) is type(max_k) is int
        if query.is_meta:
            return torch.empty_like(query, memory_format=torch.contiguous_format)
        num_queries, num_heads, head_dim = query.shape
        places = torch.arange(num_queries, device=query.device, dtype=torch.int32)
        of = torch.bucketize(places, cum_seq_q[1:-1], right=True)
        within = torch.arange(max_k, device=query.device)
        is_unreached = places - cum_seq_q.index_select(0, of) >= max_q
        own = (seqused_k - cum_seq_q[1:]).index_select(0, of) + places
        # A longer or wider sequence than the host says is cut off.
        is_seen = within < seqused_k.clamp(max=max_k).index_select(0, of)[:, None]
        if is_causal and max_q > 1:
            is_seen &= within <= own[:, None]
        if window_size_left is not None:
            is_seen &= within >= own[:, None] - window_size_left
        if window_size_right is not None:
            is_seen &= within <= own[:, None] + window_size_right
        read = cum_seq_k.index_select(0, of)[:, None] + within
        is_outside = (is_seen & ((read < 0) | (read >= len(key)))).any(dim=-1)
        read = read.where(is_seen, 0).clamp(0, len(key) - 1)
        keys, values = (
            tokens.index_select(0, read.flatten())
            .view(num_queries, max_k, *tokens.shape[1:])
            .where(is_seen[:, :, None, None], 0)
            .repeat_interleave(num_heads // key.shape[1], dim=2)
            for tokens in (key, value)
        )
        factor = head_dim**-0.5 if scale is None else scale
        scores = torch.einsum("mhd,mkhd->mhk", query, keys) * factor
        weights = scores.masked_fill(~is_seen[:, None], -torch.inf).softmax(-1)
        output = torch.einsum("mhk,mkhd->mhd", weights, values)
        return output.masked_fill((is_outside | is_unreached)[:, None, None], torch.nan)

    def _check(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *numbers: torch.Tensor
    ) -> None:
        """Refuse what torch refuses."""
        tensors = (query, key, value, *numbers)
        assert {each.device.type for each in tensors} == {self._device or query.device.type}
        assert query.dtype in self._dtypes
        assert query.dtype == key.dtype == value.dtype
        assert all(each.stride(-1) == 1 for each in tensors)
        head_dim, num_seqs = query.shape[-1], len(numbers[-1])
        assert head_dim % FLASH_HEAD_DIM_STEP == 0
        assert head_dim <= MAX_FLASH_HEAD_DIM
        assert key.shape == value.shape == (len(key), key.shape[1], head_dim)
        assert query.dim() == 3
        assert query.shape[1] % key.shape[1] == 0
        assert all(each.dtype == torch.int32 and each.is_contiguous() for each in numbers)
        assert [each.shape for each in numbers] == [(num_seqs + 1,)] * 2 + [(num_seqs,)]
