"""Calculates how much KV memory fits into a replica's share of a device.

    left = min(share x total, total - foreign)
    budget = left - max(headroom x left, outside) - weights - activations - graphs

Keys and values get what is left, or less where there is a limit on them: on a CPU they share the
memory with all other programs.

`outside` is what a process on a GPU holds there besides: its CUDA context and the workspaces of
libraries. In a small share it is more than the headroom.

`foreign` is memory that this process's allocator has not taken: the CUDA context, and the memory of
other processes. It matters only if they have taken more than their shares.

Layers that keep equally many tokens of a sequence form a group, and each group has its own blocks.
All groups are planned for the same sequences: for as many as may run, of the greatest length that
all of them can have at once. If that were less than `TYPICAL_TOKENS`, then for fewer sequences of
this length; otherwise short memory would leave the windows of a few sequences only. A group never
gets more blocks than the most sequences of the model's full length need, nor fewer than one of them
needs. What is left goes first to the group that keeps most tokens of a sequence, where a sequence
that is longer than the others needs it.

Nothing here imports torch. Source for the bytes of a token: keys and values, per layer and per KV
head (not per query head), `deployments.engine.attention.kv_cache.KVShape.group_token_bytes`.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

GIB = 2**30

HEADROOM = 0.1
"""The part of a share that stays unplanned: what is outside the caching allocator, and what blocks
that fragment waste."""

OUTSIDE_BYTES = 512 * 2**20
"""What a process holds of a GPU outside the caching allocator: its CUDA context, the kernels that
are loaded, and libraries' workspaces. An estimate from the field (300 to 500 MB); what a replica
has measured is in its report."""

POOLER_STEP_TOKENS = 2048
"""Tokens of a micro-batch of texts, unless a GPU packs them."""

TYPICAL_TOKENS = 2048
"""The length of sequences for which short memory is divided among groups."""


MAX_PENALTY_ENTRIES = 2**20
"""The most entries, of a token in a row, to which penalties are applied at once; one row may have
more."""

PENALTY_ENTRY_BYTES = 64
"""What a GPU holds of an entry while penalties are applied to it: its token in 32 and 64 bits, its
count, and nine values on the way to the new logit."""


class DeviceMemoryError(ValueError):
    """The share can't hold the model and one sequence; the message says what to change.

    Attributes:
        least_bytes: The smallest share that would do, in bytes; None if it is not known.
    """

    def __init__(self, message: str, least_bytes: int | None = None) -> None:
        super().__init__(message, least_bytes)
        self.message = message
        self.least_bytes = least_bytes

    def __str__(self) -> str:
        """Return the message."""
        return self.message


class ModelTooLargeError(DeviceMemoryError):
    """The share could not hold the model if nothing else ran: another attempt ends the same."""


@dataclass(frozen=True, slots=True)
class GroupDemand:
    """What layers that keep equally many tokens of a sequence need.

    Attributes:
        capacity: The most tokens of a sequence that they keep.
        token_bytes: Bytes of one token's keys and values in all of them.
        block_size: Tokens of a block.
    """

    capacity: int
    token_bytes: int
    block_size: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.token_bytes * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that a sequence of `num_tokens` tokens needs."""
        return -(-min(num_tokens, self.capacity) // self.block_size)


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """The memory that a model needs of its share.

    Attributes:
        weight_bytes: The weights.
        activation_bytes: The peak of a step, without weights and KV memory.
        groups: Its groups of layers, the one with the largest capacity first; none if the model
            keeps no keys and values, as a classifier.
        graph_bytes: Captured decode steps; 0 if none are captured.
        outside_bytes: What the process holds of the device outside its allocator; 0 on a CPU.
    """

    weight_bytes: int
    activation_bytes: int
    groups: tuple[GroupDemand, ...]
    graph_bytes: int = 0
    outside_bytes: int = 0

    def headroom_bytes(self, left_bytes: int) -> int:
        """Return what stays unplanned of the bytes that the replica may use."""
        return max(left_bytes - int(left_bytes * (1 - HEADROOM)), self.outside_bytes)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of all but the KV memory."""
        return self.weight_bytes + self.activation_bytes + self.graph_bytes

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the blocks of one sequence of the model's full length."""
        return sum(group.blocks_for(group.capacity) * group.block_bytes for group in self.groups)

    @property
    def least_bytes(self) -> int:
        """The smallest share in bytes that holds the model and one sequence."""
        planned = self.fixed_bytes + self.sequence_bytes
        return max(ceil(planned / (1 - HEADROOM)), planned + self.outside_bytes)


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The division of a share.

    Attributes:
        share_bytes: The usable bytes of the share, without the headroom.
        kv_blocks: The blocks of each group.
        kv_bytes: Bytes of all blocks.
        num_tokens: Tokens that the first group's blocks hold, which is the one that keeps most of a
            sequence.
    """

    share_bytes: int
    kv_blocks: tuple[int, ...]
    kv_bytes: int
    num_tokens: int


def activation_bytes(
    *,
    max_batched_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    num_seqs: int,
    itemsize: int,
) -> int:
    """Estimate the peak of a step in bytes, without weights and KV memory.

    The widest point of a layer holds the residual, its norm, and both halves of the gated MLP for
    every token. The end of a step holds the float32 logits of each sequence, and up to four copies
    while log-probabilities are kept and tokens are sampled.
    """
    per_token = (4 * hidden_size + 3 * intermediate_size) * itemsize
    return max_batched_tokens * per_token + 5 * num_seqs * vocab_size * 4


GRAPH_LAYER_BYTES = 384 * 2**10
"""The bytes of one captured step for one layer, from vLLM's measurement: 35 graphs of Llama-3.2-1B,
with 16 layers, took 0.21 GiB, including their common pool. On an H100, graphs of Qwen2.5-7B's shape
took 315 KiB a layer (41 nodes each), and of Gemma 3 12B's text model 286 KiB (85 nodes), both with
their pools: so the number of nodes does not decide, and one figure serves all families.

Source: https://github.com/vllm-project/vllm/pull/11349
"""


def image_bytes(
    *, num_tokens: int, num_masks: int, num_heads: int, head_dim: int, itemsize: int
) -> int:
    """Estimate what the attention of a prompt with images takes besides, in bytes.

    Such a prompt runs in transformers' own attention, in one step. Its masks hold an element for
    each pair of tokens, and each call converts one to the queries' type. With a mask, keys and
    values are repeated to the heads of the queries.

    Args:
        num_tokens: Tokens of the prompt.
        num_masks: Different masks: one, or two if only some layers have a window.
        num_heads: Heads of queries.
        head_dim: Elements of a head.
        itemsize: Bytes of one element.
    """
    masks = num_tokens**2 * (num_masks + itemsize)
    return masks + 2 * num_tokens * num_heads * head_dim * itemsize


def penalty_bytes(*, num_seqs: int, max_model_len: int, vocab_size: int) -> int:
    """Return the most that a GPU takes for the tokens that penalties count, in bytes.

    It holds a token and its count for each different token of each sequence, in 32 bits each, and
    applies penalties to `MAX_PENALTY_ENTRIES` of them at once, or to those of one sequence.
    """
    of_one = min(max_model_len, vocab_size)
    at_once = max(of_one, min(num_seqs * of_one, MAX_PENALTY_ENTRIES))
    return num_seqs * of_one * 8 + at_once * PENALTY_ENTRY_BYTES


def graph_bytes(
    *, num_graphs: int, num_layers: int, decode_bytes: int, num_logits: int, itemsize: int
) -> int:
    """Estimate the memory of captured decode steps, in bytes.

    Args:
        num_graphs: Graphs that are kept at once.
        num_layers: Layers of the model.
        decode_bytes: The peak of the largest captured step, which the graphs' shared pool never
            frees.
        num_logits: Elements of the buffer for the logits of all graphs.
        itemsize: Bytes of one element.
    """
    return num_graphs * num_layers * GRAPH_LAYER_BYTES + decode_bytes + num_logits * itemsize


def plan_kv_blocks(
    *,
    total_bytes: int,
    share: float,
    demand: MemoryDemand,
    max_num_seqs: int,
    foreign_bytes: int = 0,
    sleeper_bytes: int = 0,
    max_kv_bytes: int | None = None,
) -> KVPlan:
    """Return how many blocks of each group fit into the share.

    Args:
        total_bytes: Memory of the whole device.
        share: The replica's fraction of it, above 0 and at most 1.
        demand: The memory that the model needs.
        max_num_seqs: The most sequences that may run at once, by the configuration.
        foreign_bytes: Memory of the device in use, but not by this process's allocator.
        sleeper_bytes: What other processes keep of the share while this one has its turn on it.
        max_kv_bytes: The most that keys and values get of the share; None for all that is left.

    Raises:
        DeviceMemoryError: Not even one sequence of the model's full length fits.
        ModelTooLargeError: It fits into the share, but not into `max_kv_bytes`.
    """
    # Some of the sleepers, or none, hold theirs by now; the others load later.
    free_bytes = total_bytes - max(foreign_bytes, sleeper_bytes)
    left_bytes = int(max(0, min(total_bytes * share - sleeper_bytes, free_bytes)))
    share_bytes = max(0, left_bytes - demand.headroom_bytes(left_bytes))
    budget_bytes = share_bytes - demand.fixed_bytes
    if budget_bytes < demand.sequence_bytes:
        held = f", of which others hold {foreign_bytes / GIB:.2f} GiB," if foreign_bytes else ""
        raise DeviceMemoryError(
            f"a share of {share:g} of {total_bytes / GIB:.2f} GiB{held} leaves "
            f"{share_bytes / GIB:.2f} GiB to use, but the model needs {_described(demand)}; "
            f"{_remedy(total_bytes, share, demand)}",
            demand.least_bytes,
        )
    if max_kv_bytes is not None and max_kv_bytes < demand.sequence_bytes:
        raise ModelTooLargeError(
            f"keys and values may take {max_kv_bytes / GIB:.2f} GiB, but one sequence of the "
            f"model's full length needs {demand.sequence_bytes / GIB:.2f} GiB; raise "
            f"kv_cache_memory_bytes to {demand.sequence_bytes}, or lower max_model_len",
            demand.least_bytes,
        )
    if not demand.groups:
        return KVPlan(share_bytes, (), 0, 0)
    if max_kv_bytes is not None:
        budget_bytes = min(budget_bytes, max_kv_bytes)
    blocks = _fill(demand.groups, max_num_seqs, budget_bytes)
    kv_bytes = _bytes_of(demand.groups, blocks)
    num_tokens = blocks[0] * demand.groups[0].block_size
    return KVPlan(share_bytes, tuple(blocks), kv_bytes, num_tokens)


def _described(demand: MemoryDemand) -> str:
    parts = {"weights": demand.weight_bytes, "a step": demand.activation_bytes}
    if demand.graph_bytes:
        parts["captured steps"] = demand.graph_bytes
    if demand.groups:
        parts["one sequence"] = demand.sequence_bytes
    *first, last = [f"{size / GIB:.2f} GiB for {name}" for name, size in parts.items()]
    return f"{', '.join(first)} and {last}"


def _remedy(total_bytes: int, share: float, demand: MemoryDemand) -> str:
    """Return what to write in the configuration, with the numbers that would do."""
    least_share = ceil(100 * demand.least_bytes / total_bytes) / 100
    if least_share <= share:
        larger = "end what else holds memory"
    elif least_share <= 1:
        larger = f"raise num_gpus (or gpu_share) to {least_share:g}"
    else:
        larger = f"give it a device of {demand.least_bytes / GIB:.1f} GiB"
    share_bytes = int(total_bytes * share)
    if demand.weight_bytes >= share_bytes - demand.headroom_bytes(share_bytes):
        return larger
    smaller = "lower max_model_len or max_batched_tokens"
    graphs = ", or switch cuda_graphs off" if demand.graph_bytes else ""
    return f"{larger}, or {smaller}{graphs}"


def _fill(groups: tuple[GroupDemand, ...], max_num_seqs: int, budget_bytes: int) -> list[int]:
    """Return each group's blocks: see the module's docstring."""

    def fits(num_seqs: int, length: int) -> bool:
        return _bytes_of(groups, _blocks_at(groups, num_seqs, length)) <= budget_bytes

    num_seqs = _last(range(1, max_num_seqs + 1), lambda num: fits(num, TYPICAL_TOKENS))
    length = min(TYPICAL_TOKENS, groups[0].capacity)
    if num_seqs == max_num_seqs:
        length = _last(range(length, groups[0].capacity + 1), lambda each: fits(num_seqs, each))
    blocks = _blocks_at(groups, num_seqs, length)
    for i, group in enumerate(groups):
        left_bytes = budget_bytes - _bytes_of(groups, blocks)
        most = max_num_seqs * group.blocks_for(group.capacity)
        blocks[i] = min(most, blocks[i] + left_bytes // group.block_bytes)
    return blocks


def _last(numbers: range, fits: Callable[[int], bool]) -> int:
    """Return the last number that fits; the first does, and none after one that does not."""
    return numbers[bisect_left(numbers, True, key=lambda number: not fits(number)) - 1]


def _blocks_at(groups: tuple[GroupDemand, ...], num_seqs: int, length: int) -> list[int]:
    """Return each group's blocks for sequences of a length, and for one of the full length."""
    return [
        max(group.blocks_for(group.capacity), num_seqs * group.blocks_for(length))
        for group in groups
    ]


def _bytes_of(groups: tuple[GroupDemand, ...], blocks: list[int]) -> int:
    return sum(num * group.block_bytes for num, group in zip(blocks, groups, strict=True))
