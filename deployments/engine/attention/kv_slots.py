"""The preallocated keys and values: one slot for each running sequence.

Owns the tensors. A slot holds max_model_len tokens in every layer, so an admitted sequence never
runs out of memory. A layer with a sliding window holds only its window, as a ring: the token at
position p is stored at p % capacity. A layer without a window is a ring that never wraps. The slot
table decides which sequence holds which slot.

Edits allocate nothing. They happen between two steps, where running out of memory could not be
blamed on any sequence, and often right after a step that did run out of memory.

Attention reads beyond a sequence's end and masks what it reads, but no mask hides a NaN. So a
running sequence's slot holds zeros wherever the sequence has not written.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs

from deployments.engine.scheduling.slot_edits import SlotCopy, SlotEdit, SlotSwap, SlotWipe

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedConfig


SWAPPED_AT_ONCE = 4096
"""Tokens of one layer that are swapped at a time."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The keys and values of one token.

    Attributes:
        windows: For each layer with attention, the most tokens that a query sees, itself included;
            None if it sees all.
        num_kv_heads: Heads of keys and values; fewer than query heads with grouped queries.
        head_dim: Elements of one head.
        dtype: Type of the elements.
    """

    windows: tuple[int | None, ...]
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, text_config: "PreTrainedConfig", dtype: torch.dtype) -> "KVShape":
        """Read the shape from a model's text configuration."""
        num_heads = text_config.num_attention_heads
        head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // num_heads
        num_kv_heads = getattr(text_config, "num_key_value_heads", None) or num_heads
        return cls(_windows(text_config), num_kv_heads, head_dim, dtype)

    @property
    def bytes_per_layer_token(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def capacities(self, max_model_len: int) -> tuple[int, ...]:
        """Return how many tokens a slot holds in each layer."""
        return tuple(min(window or max_model_len, max_model_len) for window in self.windows)

    def slot_bytes(self, max_model_len: int) -> int:
        """Return the bytes of one slot."""
        return sum(self.capacities(max_model_len)) * self.bytes_per_layer_token


def _windows(text_config: "PreTrainedConfig") -> tuple[int | None, ...]:
    """Return each layer's window, from the same source as transformers' own caches."""
    return tuple(
        options.get("sliding_window") for options in get_layer_types_and_kwargs(text_config)[1]
    )


class KVSlots:
    """Keys and values per layer: [num_slots, capacity of the layer, num_kv_heads, head_dim]."""

    def __init__(
        self, shape: KVShape, *, num_slots: int, max_model_len: int, device: torch.device
    ) -> None:
        """Allocate all slots at once, as zeros.

        Args:
            shape: The keys and values of one token.
            num_slots: Sequences that can run at once.
            max_model_len: The most tokens of a sequence.
            device: Where the model runs.
        """
        self.shape = shape
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.device = device
        self.capacities = shape.capacities(max_model_len)

        def allocate(num_tokens: int) -> torch.Tensor:
            size = (num_tokens, shape.num_kv_heads, shape.head_dim)
            return torch.zeros(size, dtype=shape.dtype, device=device)

        def slots_of(tokens: torch.Tensor) -> torch.Tensor:
            return tokens[:-1].view(num_slots, -1, *tokens.shape[1:])

        # One spare token follows the slots: see `write_tokens`.
        sizes = [num_slots * capacity + 1 for capacity in self.capacities]
        self._key_tokens = [allocate(size) for size in sizes]
        self._value_tokens = [allocate(size) for size in sizes]
        self.keys = [slots_of(tokens) for tokens in self._key_tokens]
        self.values = [slots_of(tokens) for tokens in self._value_tokens]
        # Sequences leave their slots when memory is short, so a swap must not allocate.
        self._held = allocate(min(SWAPPED_AT_ONCE, max(self.capacities)))

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.shape.slot_bytes(self.max_model_len)

    @property
    def full_context_length(self) -> int:
        """The longest sequence that a slot holds completely in every layer."""
        return min(self.capacities)

    def write_rows(
        self,
        layer: int,
        slots: torch.Tensor,
        indices: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Store the keys and values of n tokens, each from a different sequence.

        Args:
            layer: Index of the layer.
            slots: [n], int64, the slot of each token.
            indices: [n], int64, the position of each token in its sequence, modulo the layer's
                capacity.
            keys: [n, num_kv_heads, head_dim].
            values: [n, num_kv_heads, head_dim].
        """
        self.keys[layer][slots, indices] = keys
        self.values[layer][slots, indices] = values

    def write_tokens(
        self, layer: int, tokens: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store the keys and values of n tokens, some of which may be padding.

        Args:
            layer: Index of the layer.
            tokens: [n], int64: slot * capacity + index; for padding num_slots * capacity, the spare
                place, which is never read.
            keys: [n, num_kv_heads, head_dim].
            values: [n, num_kv_heads, head_dim].
        """
        self._key_tokens[layer].index_copy_(0, tokens, keys)
        self._value_tokens[layer].index_copy_(0, tokens, values)

    def tokens(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values: all slots in a row, then the spare place.

        Returns:
            [num_slots * capacity + 1, num_kv_heads, head_dim] each.
        """
        return self._key_tokens[layer], self._value_tokens[layer]

    def write_chunk(
        self, layer: int, slot: int, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store the keys and values of m neighbouring tokens, or of the last ones that fit.

        Args:
            layer: Index of the layer.
            slot: The slot.
            start: The first token's position in its sequence.
            keys: [m, num_kv_heads, head_dim].
            values: [m, num_kv_heads, head_dim].
        """
        end = start + len(keys)
        first = max(start, end - self.capacities[layer])
        before, after = ring_slices(first, end, self.capacities[layer])
        num_before = before.stop - before.start
        for stored, new in ((self.keys[layer], keys), (self.values[layer], values)):
            newest = new[first - start :]
            stored[slot, before] = newest[:num_before]
            stored[slot, after] = newest[num_before:]

    def joined(
        self, layer: int, slot: int, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join the earlier tokens that a chunk sees in its slot, in order, with the chunk's own.

        Args:
            layer: Index of the layer.
            slot: The slot.
            start: The chunk's first position in its sequence.
            keys: [m, num_kv_heads, head_dim].
            values: [m, num_kv_heads, head_dim].

        Returns:
            [t + m, num_kv_heads, head_dim] each. t is `start`, but at most the capacity less one,
            because the chunk's first query also sees itself.
        """
        if start == 0:
            return keys, values
        capacity = self.capacities[layer]
        slices = ring_slices(max(0, start - (capacity - 1)), start, capacity)
        old_keys = [self.keys[layer][slot, part] for part in slices]
        old_values = [self.values[layer][slot, part] for part in slices]
        return torch.cat([*old_keys, keys]), torch.cat([*old_values, values])

    def load(self, slot: int, cache: "DynamicCache") -> None:
        """Copy one sequence's stock cache into a slot.

        The cache of a sliding layer holds only the newest tokens. Older ones are outside the window
        of every later query.
        """
        num_tokens = cache.get_seq_length()
        for layer, stored in enumerate(cache.layers):
            assert isinstance(stored, CacheLayerMixin)
            assert stored.keys is not None
            assert stored.values is not None
            keys, values = stored.keys[0].transpose(0, 1), stored.values[0].transpose(0, 1)
            self.write_chunk(layer, slot, num_tokens - len(keys), keys, values)

    def apply(self, edits: Iterable[SlotEdit]) -> None:
        """Apply the scheduler's edits in order, without allocating memory."""
        for edit in edits:
            for tensor in self._tensors():
                _edit(tensor, edit, self._held)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.keys
        yield from self.values


def ring_slices(first: int, end: int, capacity: int) -> tuple[slice, slice]:
    """Return the ring's slices for tokens `first` .. `end`-1: up to its end, and from its start.

    There are at most `capacity` tokens. Either slice may be empty.
    """
    at = first % capacity
    num_before = min(end - first, capacity - at)
    return slice(at, at + num_before), slice(0, end - first - num_before)


def _edit(tensor: torch.Tensor, edit: SlotEdit, held: torch.Tensor) -> None:
    """Edit one layer's keys or values. Slicing cuts the edit to the ring's length."""
    match edit:
        case SlotSwap(first, second, length):
            _swap(tensor[first, :length], tensor[second, :length], held)
        case SlotCopy(source, target, length):
            tensor[target, :length] = tensor[source, :length]
        case SlotWipe(slot, start, end):
            tensor[slot, start:end].zero_()


def _swap(first: torch.Tensor, second: torch.Tensor, held: torch.Tensor) -> None:
    """Exchange contents through a third tensor, which may be shorter."""
    for start in range(0, len(first), len(held)):
        one, other = (tensor[start : start + len(held)] for tensor in (first, second))
        kept = held[: len(one)].copy_(one)
        one.copy_(other)
        other.copy_(kept)
