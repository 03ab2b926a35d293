"""Small steps with prompts as captured CUDA graphs, on a GPU that reads extents by length.

Launching the kernels of a step from Python takes as long as computing some 1,000 tokens, and each
launch may wait for Python's lock. So a step of few tokens, decode rows and chunks together, is
padded to one of a few sizes (`mixed_sizes`), and each is a graph. Decode rows are sequences with
one query: all attend in one call. A sequence without queries is padding, and so are rows of no
sequence, which store into the spare token.

A step takes a graph only if it fits: no more tokens than the largest size, `MAX_SEQS` sequences and
as many rows that are due, no chunk that outgrows its window, and no decode row that reads more than
`MAX_DECODE_READ` tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

import torch

from deployments.compute.host_to_device import host_tensor
from deployments.engine.attention.kv_cache import KVCache
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.attention.step_reads import StepReads, places_of
from deployments.engine.attention.varlen_reads import ExtentReads
from deployments.plan.graph_sizes import mixed_sizes

MAX_SEQS = 64
"""The most sequences of a captured step. Flash attention starts a block for each, and for a step of
hundreds of tokens that are few; more decode rows amortise the launches of a plain step."""

MAX_DECODE_READ = 4096
"""The most tokens that a decode row of a captured step reads in a layer. Flash attention splits a
long read among the GPU's processors only if all sequences of its call have one query. Here one
block for each head reads a decode row alone, and a long read would outlast the launches saved.
Chosen by reading, not by measuring."""


@dataclass(frozen=True, slots=True)
class MixedInputs:
    """The static inputs of a step of t tokens, of which each graph reads the first.

    Attributes:
        token_ids: [t], int64.
        positions: [t], int64.
        due: [s], int64, the rows whose logits are wanted.
        query_starts: [s + 1], int64, the first row of each sequence.
        places: For each group, [t], int64, where each row's token is stored.
        starts: For each group, [s + 1], int64, the first token of each sequence's extent.
        lengths: For each group, [s], int64, how many tokens each sequence has.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    due: torch.Tensor
    query_starts: torch.Tensor
    places: tuple[torch.Tensor, ...]
    starts: tuple[torch.Tensor, ...]
    lengths: tuple[torch.Tensor, ...]

    @staticmethod
    def sizes(num_tokens: int, num_seqs: int, num_groups: int) -> list[int]:
        """Return the lengths of all inputs, in their order in memory."""
        group = [num_tokens, num_seqs + 1, num_seqs]
        return [num_tokens, num_tokens, num_seqs, num_seqs + 1, *group * num_groups]

    @classmethod
    def of(cls, memory: torch.Tensor, num_tokens: int, num_seqs: int, num_groups: int) -> Self:
        """Return the inputs that lie in memory one after the other."""
        sizes = cls.sizes(num_tokens, num_seqs, num_groups)
        token_ids, positions, due, query_starts, *groups = torch.split(memory[: sum(sizes)], sizes)
        return cls(
            token_ids,
            positions,
            due,
            query_starts,
            tuple(groups[0::3]),
            tuple(groups[1::3]),
            tuple(groups[2::3]),
        )


@dataclass(slots=True)
class StaticMixedStep(PackedStep):
    """A step of any rows whose places are computed from static inputs."""

    inputs: MixedInputs = field(kw_only=True)

    @classmethod
    def of(cls, kv: KVCache, inputs: MixedInputs) -> Self:
        """Return a step that reads these inputs."""
        return cls(kv, (), (), (), inputs=inputs)

    def reads(self, capacity: int) -> StepReads:
        """Return what the rows store and read in layers of this capacity, by lengths."""
        if capacity not in self._reads:
            group, inputs = self.kv.group_of(capacity), self.inputs
            reads = ExtentReads(
                inputs.query_starts.int(),
                inputs.starts[group].int(),
                inputs.lengths[group].int(),
                len(inputs.token_ids),
                capacity,
            )
            self._reads[capacity] = StepReads(inputs.places[group], None, reads)
        return self._reads[capacity]


@dataclass(frozen=True, slots=True)
class MixedSize:
    """One size of mixed steps.

    Attributes:
        num_tokens: Rows, some of which may be padding.
    """

    num_tokens: int


class MixedSteps:
    """The static inputs of small mixed steps."""

    def __init__(self, kv: KVCache, max_num_seqs: int, max_batched_tokens: int) -> None:
        """Allocate the inputs.

        Args:
            kv: The KV cache.
            max_num_seqs: The most sequences of a step.
            max_batched_tokens: The most tokens of a step.
        """
        self._kv = kv
        self._num_seqs = min(MAX_SEQS, max_num_seqs)
        self._sizes = mixed_sizes(max_batched_tokens)
        self._num_tokens = max(self._sizes)
        num_values = sum(MixedInputs.sizes(self._num_tokens, self._num_seqs, kv.num_groups))
        self._memory = torch.zeros(num_values, dtype=torch.int64, device=kv.device)

    @property
    def sizes(self) -> list[MixedSize]:
        """All sizes, the largest first."""
        return [MixedSize(size) for size in self._sizes]

    def cover(self, step: PackedStep, num_due: int) -> MixedSize | None:
        """Return the size that a step takes; None if it fits none."""
        num_tokens = step.num_decode + sum(chunk.end - chunk.start for chunk in step.chunks)
        num_seqs = step.num_decode + len(step.chunks)
        if num_tokens > self._num_tokens or max(num_seqs, num_due) > self._num_seqs:
            return None
        if any(chunk.end > self._kv.full_context_length for chunk in step.chunks):
            return None
        longest = min(max(step.decode_positions, default=-1) + 1, max(self._kv.capacities))
        if longest > MAX_DECODE_READ:
            return None
        return MixedSize(min(size for size in self._sizes if size >= num_tokens))

    def static_step(self, size: MixedSize) -> "StaticMixedStep":
        """Return the step of a size that reads the static inputs."""
        num_groups = self._kv.num_groups
        inputs = MixedInputs.of(self._memory, size.num_tokens, self._num_seqs, num_groups)
        return StaticMixedStep.of(self._kv, inputs)

    def fill(
        self,
        size: MixedSize,
        step: PackedStep,
        token_ids: Sequence[int] = (),
        positions: Sequence[int] = (),
        due: Sequence[int] = (),
    ) -> None:
        """Fill the static inputs with a step, and with padding after it."""
        counts = [1] * step.num_decode + [chunk.end - chunk.start for chunk in step.chunks]
        num_seqs, num_tokens = self._num_seqs, size.num_tokens
        values = [
            *_padded(token_ids, num_tokens),
            *_padded(positions, num_tokens),
            *_padded(due, num_seqs),
            # A sequence that starts where the last one ends has no queries.
            *_padded([*accumulate(counts, initial=0)], num_seqs + 1, sum(counts)),
        ]
        for group, capacity in enumerate(self._kv.layout.capacities):
            spare_token = self._kv.spare_tokens[group]
            places = places_of(
                self._kv, capacity, step.decode_starts, step.decode_positions, step.chunks
            )
            values += _padded(places, num_tokens, spare_token)
            values += _padded(list(_starts(step, group)), num_seqs + 1, spare_token)
            values += _padded(list(_lengths(step, capacity)), num_seqs)
        host = host_tensor(values, self._memory.device, torch.int64)
        self._memory[: len(values)].copy_(host, non_blocking=True)


def _starts(step: PackedStep, group: int) -> Iterator[int]:
    for row in step.decode_starts:
        yield row[group]
    for chunk in step.chunks:
        yield chunk.starts[group]


def _lengths(step: PackedStep, capacity: int) -> Iterator[int]:
    for position in step.decode_positions:
        yield min(position + 1, capacity)
    for chunk in step.chunks:
        yield chunk.end


def _padded(numbers: Sequence[int], length: int, padding: int = 0) -> list[int]:
    return [*numbers, *[padding] * (length - len(numbers))]
