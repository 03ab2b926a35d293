"""The preallocated keys and values: one slot for each sequence that runs.

Owns the tensors. A slot is a row that holds max_model_len tokens in every layer, so a sequence
that was admitted never lacks memory. Which sequence holds which slot is the scheduler's matter.

Attention reads beyond a sequence's end and masks what it finds there, but no mask hides a NaN. So a
slot holds zeros wherever its sequence has written nothing, and all over while it is free.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import CacheLayerMixin

from deployments.engine.scheduler import SlotMove

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedConfig


@dataclass(frozen=True, slots=True)
class KVShape:
    """The keys and values of one token.

    Attributes:
        num_layers: Layers with attention.
        num_kv_heads: Heads of keys and values; fewer than query heads under grouped queries.
        head_dim: Elements of one head.
        dtype: Type of the elements.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, text_config: "PreTrainedConfig", dtype: torch.dtype) -> "KVShape":
        """Read the shape from a model's text configuration."""
        num_heads = text_config.num_attention_heads
        head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // num_heads
        num_kv_heads = getattr(text_config, "num_key_value_heads", None) or num_heads
        return cls(text_config.num_hidden_layers, num_kv_heads, head_dim, dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVSlots:
    """Keys and values per layer: [num_slots, max_model_len, num_kv_heads, head_dim]."""

    def __init__(
        self, shape: KVShape, *, num_slots: int, max_model_len: int, device: torch.device
    ) -> None:
        """Allocate all slots at once, as zeros.

        Args:
            shape: The keys and values of one token.
            num_slots: Sequences that can run at once.
            max_model_len: Tokens that each slot holds.
            device: Where the model runs.
        """
        size = (num_slots, max_model_len, shape.num_kv_heads, shape.head_dim)

        def allocate() -> torch.Tensor:
            return torch.zeros(size, dtype=shape.dtype, device=device)

        self.shape = shape
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.keys = [allocate() for _ in range(shape.num_layers)]
        self.values = [allocate() for _ in range(shape.num_layers)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.max_model_len * self.shape.bytes_per_token

    def write(
        self,
        layer: int,
        slots: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Store the keys and values of n tokens.

        Args:
            layer: Index of the layer.
            slots: [n], int64, the slot of each token.
            positions: [n], int64, the position of each token in its sequence.
            keys: [n, num_kv_heads, head_dim].
            values: [n, num_kv_heads, head_dim].
        """
        self.keys[layer][slots, positions] = keys
        self.values[layer][slots, positions] = values

    def load(self, slot: int, cache: "DynamicCache") -> None:
        """Copy a stock cache of one sequence into a slot.

        A sliding layer's cache holds only the newest tokens; they go to their own positions. What
        stands before them lies outside every later query's window.
        """
        num_tokens = cache.get_seq_length()
        for layer, stored in enumerate(cache.layers):
            assert isinstance(stored, CacheLayerMixin)
            assert stored.keys is not None
            assert stored.values is not None
            where = slice(num_tokens - stored.keys.shape[-2], num_tokens)
            self.keys[layer][slot, where] = stored.keys[0].transpose(0, 1)
            self.values[layer][slot, where] = stored.values[0].transpose(0, 1)

    def move(self, move: SlotMove) -> None:
        """Move one slot's tokens into another, which is free; the source is free afterwards."""
        for tensor in self._tensors():
            tensor[move.target, : move.length] = tensor[move.source, : move.length]
        self.wipe(move.source, move.length)

    def wipe(self, slot: int, length: int) -> None:
        """Zero a slot's tokens, as one that is free must be: they may be NaN or infinity."""
        for tensor in self._tensors():
            tensor[slot, :length].zero_()

    def _tensors(self) -> Iterable[torch.Tensor]:
        yield from self.keys
        yield from self.values
