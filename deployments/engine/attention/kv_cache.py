"""The keys and values, reserved at the start: one row of tokens for each layer, cut into blocks.

Owns the tensors. The blocks of a group are the same in all of its layers. A running sequence holds
an extent in each group, and the token at position p of the sequence is stored at start + p %
capacity, where start is the extent's first token. So a layer with a sliding window is a ring of its
window, and a layer without a window is a ring that never wraps. An extent shorter than the capacity
never wraps either: the scheduler moves a sequence that outgrows its extent.

Copies allocate nothing. They happen between two steps, where running out of memory could not be
blamed on any sequence, and often right after a step that did run out of memory.

On a GPU the reserved memory is allocated, and can only be given back as a whole (`give_back_all`).
On a CPU it takes memory only where tokens were written, and blocks that no sequence holds can give
it back (`give_back`).

Nothing is ever cleaned, so a block may hold another sequence's tokens, and NaN among them. No mask
hides a NaN: a sequence reads only tokens that it has written itself or was given by a copy.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import CacheLayerMixin

from deployments.compute.host_memory import ReservedMemory
from deployments.compute.speedups import AttendRows, DeviceMemory, Store
from deployments.plan.kv_layout import Extent, KVCopy, KVLayout, layers_by_capacity
from deployments.plan.model_shape import kv_heads_of, windows_of

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedConfig


MOVED_AT_ONCE = 4096
"""Tokens of one layer that are copied at a time if source and target overlap."""


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
        return cls(windows_of(text_config), *kv_heads_of(text_config), dtype)

    @property
    def bytes_per_layer_token(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def capacities(self, max_model_len: int) -> tuple[int, ...]:
        """Return how many tokens of a sequence each layer keeps."""
        return tuple(min(window or max_model_len, max_model_len) for window in self.windows)

    def group_capacities(self, max_model_len: int) -> tuple[int, ...]:
        """Return how many tokens of a sequence the layers of each group keep, the most first."""
        return tuple(layers_by_capacity(self.windows, max_model_len))

    def group_token_bytes(self, max_model_len: int) -> tuple[int, ...]:
        """Return the bytes of one token in all layers of each group."""
        layers = layers_by_capacity(self.windows, max_model_len)
        return tuple(number * self.bytes_per_layer_token for number in layers.values())


def comes_with_writes(device: torch.device) -> bool:
    """Return whether memory of a device is taken page by page, by the first write to each."""
    return device.type == "cpu"


class KVCache:
    """Keys and values of all layers.

    Attributes:
        shape: The keys and values of one token.
        layout: The blocks of each group.
        max_model_len: The most tokens of a sequence.
        device: Where the tensors are.
        attends_in_place: Whether `attend_rows` attends; otherwise torch does.
        reads_by_length: Whether torch's flash attention reads the extents (`ExtentReads`).
        store: Stores keys and values in one launch; None if torch stores them one by one.
        attend_rows: Attends in captured steps of decode rows; None if torch's flash attention does.
        capacities: For each layer, the most tokens of a sequence that it keeps.
        groups: For each layer, the index of its group.
        spare_tokens: For each group, the token after its blocks. Padding is stored there and reads
            there; nothing else does.
        keys: For each layer, [tokens of the group's blocks + 1, num_kv_heads, head_dim].
        values: As keys.
    """

    def __init__(
        self,
        shape: KVShape,
        layout: KVLayout,
        *,
        max_model_len: int,
        device: torch.device,
        attends_in_place: bool = False,
        reads_by_length: bool = False,
        store: Store | None = None,
        attend_rows: AttendRows | None = None,
    ) -> None:
        """Reserve all blocks at once, as zeros.

        Args:
            shape: The keys and values of one token.
            layout: The blocks; its groups are those of `shape` and `max_model_len`.
            max_model_len: The most tokens of a sequence.
            device: Where the model runs.
            attends_in_place: Whether `attend_rows` attends; see `can_attend_rows`.
            reads_by_length: Whether flash attention reads the extents; see `find_obstacle`.
            store: Stores keys and values in one launch; see `find_store`.
            attend_rows: Attends in captured steps of decode rows; see `find_row_attention`.
        """
        assert layout.capacities == shape.group_capacities(max_model_len)
        self.shape = shape
        self.layout = layout
        self.max_model_len = max_model_len
        self.device = device
        self.attends_in_place = attends_in_place
        self.reads_by_length = reads_by_length
        self.store = store
        self.attend_rows = attend_rows
        self.capacities = shape.capacities(max_model_len)
        self.groups = tuple(map(self.group_of, self.capacities))
        self.spare_tokens = tuple(count * layout.block_size for count in layout.num_blocks)

        def size_of(num_tokens: int) -> tuple[int, int, int]:
            return num_tokens, shape.num_kv_heads, shape.head_dim

        sizes = [size_of(self.spare_tokens[group] + 1) for group in self.groups]
        # Sequences are moved when memory is short, so a move must not allocate.
        held = size_of(min(MOVED_AT_ONCE, max(self.capacities)))
        self._reserved: ReservedMemory | None = None
        if comes_with_writes(device):
            all_sizes = (held, *sizes, *sizes)
            num_bytes = sum(ReservedMemory.size_of(size, shape.dtype) for size in all_sizes)
            self._reserved = ReservedMemory(num_bytes)
        self._held, *both = map(self._allocate, (held, *sizes, *sizes))
        self.keys, self.values = both[: len(sizes)], both[len(sizes) :]
        self._memory = DeviceMemory(self._tensors, device)

    def _allocate(self, size: tuple[int, int, int]) -> torch.Tensor:
        if self._reserved is not None:
            return self._reserved.zeros(size, self.shape.dtype)
        return torch.zeros(size, dtype=self.shape.dtype, device=self.device)

    @property
    def can_give_back(self) -> bool:
        """Whether blocks can give their memory back to the operating system."""
        return self._reserved is not None

    def give_back_all(self) -> None:
        """Give the memory of all blocks back; no sequence holds one until `take_back`.

        On a GPU, captured graphs that read or write blocks must not be replayed any more.
        """
        if self._reserved is not None:
            self._reserved.give_back_all()
        else:
            self._memory.give_back()

    @torch.inference_mode()
    def take_back(self) -> None:
        """Reserve all blocks again, as zeros, after `give_back_all`.

        Raises:
            RuntimeError: The GPU has no room (`is_out_of_memory`), or is lost.
        """
        if self._reserved is None:
            self._memory.take_back()
            for each in self._tensors:
                each.zero_()

    @property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return (self._held, *self.keys, *self.values)

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return len(self.layout.capacities)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        token_bytes = self.shape.group_token_bytes(self.max_model_len)
        return sum(n * size for n, size in zip(self.spare_tokens, token_bytes, strict=True))

    @property
    def full_context_length(self) -> int:
        """The longest sequence that is kept completely in every layer."""
        return min(self.capacities)

    def group_of(self, capacity: int) -> int:
        """Return the index of the group whose layers have this capacity."""
        return self.layout.capacities.index(capacity)

    def write_tokens(
        self, layer: int, tokens: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store the keys and values of n tokens, some of which may be padding.

        Args:
            layer: Index of the layer.
            tokens: [n], int64, the place of each token in the layer; for padding the spare one.
            keys: [n, num_kv_heads, head_dim].
            values: [n, num_kv_heads, head_dim].
        """
        stored = self.keys[layer], self.values[layer]
        if self.store is not None:
            self.store(*stored, tokens, keys, values)
            return
        for own, new in zip(stored, (keys, values), strict=True):
            own.index_copy_(0, tokens, new)

    def write_chunk(
        self,
        layer: int,
        starts: tuple[int, ...],
        start: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Store the keys and values of m neighbouring tokens, or of the last ones that fit.

        Args:
            layer: Index of the layer.
            starts: The first token of the sequence's extent in each group.
            start: The first token's position in its sequence.
            keys: [m, num_kv_heads, head_dim].
            values: [m, num_kv_heads, head_dim].
        """
        end = start + len(keys)
        first = max(start, end - self.capacities[layer])
        before, after = self._places(layer, starts, first, end)
        num_before = before.stop - before.start
        for stored, new in ((self.keys[layer], keys), (self.values[layer], values)):
            newest = new[first - start :]
            stored[before] = newest[:num_before]
            stored[after] = newest[num_before:]

    def joined(
        self,
        layer: int,
        starts: tuple[int, ...],
        start: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join the earlier tokens that a chunk sees, in order, with the chunk's own.

        Args:
            layer: Index of the layer.
            starts: The first token of the sequence's extent in each group.
            start: The chunk's first position in its sequence.
            keys: [m, num_kv_heads, head_dim].
            values: [m, num_kv_heads, head_dim].

        Returns:
            [t + m, num_kv_heads, head_dim] each. t is `start`, but at most the capacity less one,
            because the chunk's first query also sees itself.
        """
        if start == 0:
            return keys, values
        first = max(0, start - (self.capacities[layer] - 1))
        parts = self._places(layer, starts, first, start)
        old_keys = [self.keys[layer][part] for part in parts]
        old_values = [self.values[layer][part] for part in parts]
        return torch.cat([*old_keys, keys]), torch.cat([*old_values, values])

    def _places(
        self, layer: int, starts: tuple[int, ...], first: int, end: int
    ) -> tuple[slice, slice]:
        """Return where a sequence's tokens `first` .. `end`-1 are in a layer, in order."""
        base = starts[self.groups[layer]]
        before, after = ring_slices(first, end, self.capacities[layer])
        return _shifted(before, base), _shifted(after, base)

    def load(self, starts: tuple[int, ...], cache: "DynamicCache") -> None:
        """Copy one sequence's stock cache into the extents that start there.

        The cache of a sliding layer holds only the newest tokens. Older ones are outside the window
        of every later query.
        """
        num_tokens = cache.get_seq_length()
        for layer, stored in enumerate(cache.layers):
            assert isinstance(stored, CacheLayerMixin)
            assert stored.keys is not None
            assert stored.values is not None
            keys, values = stored.keys[0].transpose(0, 1), stored.values[0].transpose(0, 1)
            self.write_chunk(layer, starts, num_tokens - len(keys), keys, values)

    def apply(self, copies: Iterable[KVCopy]) -> None:
        """Make the scheduler's copies in order, without allocating memory."""
        for copy in copies:
            for layer, group in enumerate(self.groups):
                if group == copy.group:
                    _copy(self.keys[layer], copy, self._held)
                    _copy(self.values[layer], copy, self._held)

    def give_back(self, group: int, blocks: Extent) -> None:
        """Give the memory of blocks back to the operating system; their contents are lost.

        Args:
            group: Index of the group.
            blocks: Blocks that neither a sequence nor a retained prefix holds.
        """
        assert self._reserved is not None
        size = self.layout.block_size
        tokens = slice(blocks.first * size, blocks.end * size)
        for layer, own in enumerate(self.groups):
            if own == group:
                self._reserved.give_back(self.keys[layer][tokens])
                self._reserved.give_back(self.values[layer][tokens])


def ring_slices(first: int, end: int, capacity: int) -> tuple[slice, slice]:
    """Return the ring's slices for tokens `first` .. `end`-1: up to its end, and from its start.

    There are at most `capacity` tokens. Either slice may be empty.
    """
    at = first % capacity
    num_before = min(end - first, capacity - at)
    return slice(at, at + num_before), slice(0, end - first - num_before)


def _shifted(part: slice, base: int) -> slice:
    return slice(base + part.start, base + part.stop)


def _copy(tensor: torch.Tensor, copy: KVCopy, held: torch.Tensor) -> None:
    """Copy inside one layer's keys or values.

    If source and target overlap, parts are copied in an order in which none overwrites one that is
    still to be copied. A part that overlaps its own target goes through a third tensor.
    """
    distance = abs(copy.source - copy.target)
    num_at_once = max(distance, len(held))
    firsts = range(0, copy.num_tokens, num_at_once)
    for first in firsts if copy.target < copy.source else reversed(firsts):
        count = min(num_at_once, copy.num_tokens - first)
        source = tensor.narrow(0, copy.source + first, count)
        if distance < count:
            source = held[:count].copy_(source)
        tensor.narrow(0, copy.target + first, count).copy_(source)
