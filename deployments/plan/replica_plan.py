"""The memory plan of one replica, from its model's configuration: before anything is loaded.

Divides the replica's share of its device among weights, a step and KV memory, once `sizes` has
chosen what the configuration leaves open. A replica plans so before it loads; `raystream plan`
prints the same for any card. Nothing here imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from deployments.contract.model_spec import ModelSpec, number
from deployments.plan.memory_budget import (
    GIB,
    POOLER_STEP_TOKENS,
    TYPICAL_TOKENS,
    KVPlan,
    MemoryDemand,
)
from deployments.plan.model_shape import ModelShape, choose_dtype_name
from deployments.plan.sizes import (
    GPU_STEP_TOKENS,
    MIN_AUTO_SEQS,
    DeviceMemory,
    SizePlanner,
    Sizes,
    divide,
)

MIN_SHARE: Final = 0.05
"""The least that a model gets of a card: a process holds some hundred MiB there before it loads."""


class SequenceLengthError(ValueError):
    """A given length is beyond the model's positions."""


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """How a replica divides its share of a device.

    Attributes:
        shape: The model.
        spec: Its spec; sizes that are auto in its entry were chosen.
        device: The device.
        dtype: Name of the type of the weights on the device.
        sizes: The sizes that the replica runs with.
        demand: What the model needs with these sizes.
        kv: The blocks that fit into the share.
        reasons: Why each size that was chosen is what it is, by its name.
        is_pooler: Whether the model classifies or embeds.
    """

    shape: ModelShape
    spec: ModelSpec
    device: DeviceMemory
    dtype: str
    sizes: Sizes
    demand: MemoryDemand
    kv: KVPlan
    reasons: tuple[tuple[str, str], ...] = ()
    is_pooler: bool = False

    @property
    def explanations(self) -> list[str]:
        """A line for each size that was chosen: what it is, and why."""
        chosen = [(name, getattr(self.sizes, name), why) for name, why in self.reasons]
        if (
            self.demand.groups
            and self.device.on_cpu
            and self.spec.entry.kv_cache_memory_bytes == "auto"
        ):
            why = "a quarter of the machine's memory"
            chosen.append(("kv_cache_memory_bytes", self.device.max_kv_bytes(self.spec), why))
        return [f"{self.spec.id}: {name} auto is {size}: {why}" for name, size, why in chosen]

    @property
    def share_bytes(self) -> int:
        """The share, with its headroom; on a CPU what others leave."""
        share = int(self.device.total_bytes * self.spec.device_share)
        return min(share, self.device.left_bytes) if self.device.on_cpu else share

    @property
    def headroom_bytes(self) -> int:
        """What stays unplanned: the CUDA context, libraries' workspaces and fragments."""
        return self.demand.headroom_bytes(self.share_bytes)

    @property
    def left_bytes(self) -> int:
        """What no part of the plan takes."""
        return self.kv.share_bytes - self.demand.fixed_bytes - self.kv.kv_bytes

    @property
    def start_bytes(self) -> int:
        """What the replica takes before the first request; more comes with sequences on a CPU."""
        return self.demand.fixed_bytes + (0 if self.device.on_cpu else self.kv.kv_bytes)

    @property
    def most_bytes(self) -> int:
        """What the replica takes with the KV memory in full use."""
        return self.demand.fixed_bytes + self.kv.kv_bytes

    @property
    def memory_summary(self) -> str:
        """The log's description of the memory that the replica takes."""
        start, most = (size / GIB for size in (self.start_bytes, self.most_bytes))
        return f"memory: {start:.2f} GiB needed at start, {most:.2f} GiB reserved at most"

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of a token's keys and values, in the layers that see it."""
        return sum(group.token_bytes for group in self.demand.groups)

    def num_sequences(self, num_tokens: int) -> int:
        """Return how many sequences of this length run at once; 0 if none may be as long."""
        if not self.demand.groups or num_tokens > self.sizes.max_model_len:
            return 0
        pairs = zip(self.kv.kv_blocks, self.demand.groups, strict=True)
        return min(
            self.sizes.max_num_seqs,
            *(blocks // group.blocks_for(num_tokens) for blocks, group in pairs),
        )

    def with_weights(self, weight_bytes: int, foreign_bytes: int) -> "ReplicaPlan":
        """Return the plan with the weights that were really loaded; sizes may be chosen again.

        A pooler keeps its sizes: its queue was made with them.

        Args:
            weight_bytes: Their bytes.
            foreign_bytes: What others hold of the device now.

        Raises:
            DeviceMemoryError: Beside them not even one sequence fits.
        """
        spec, device = self.spec, replace(self.device, foreign_bytes=foreign_bytes)
        if self.is_pooler:
            kept = {
                "max_model_len": self.sizes.max_model_len,
                "max_batched_tokens": self.sizes.max_batched_tokens,
            }
            spec = replace(spec, entry=spec.entry.model_copy(update=kept))
        return plan_replica(
            spec, self.shape, device, is_pooler=self.is_pooler, weight_bytes=weight_bytes
        )

    def for_unpacked_texts(self) -> "ReplicaPlan":
        """Return a pooler's plan with micro-batches for texts that aren't packed.

        Only the loaded model shows whether it packs texts. Attention of one that doesn't may hold
        all scores of a micro-batch, which are in no plan and grow with it.
        """
        num_tokens = min(self.sizes.max_batched_tokens, POOLER_STEP_TOKENS)
        if num_tokens == self.sizes.max_batched_tokens:
            return self
        sizes = replace(self.sizes, max_batched_tokens=num_tokens)
        smaller = replace(self, sizes=sizes).with_weights(
            self.demand.weight_bytes, self.device.foreign_bytes
        )
        return replace(smaller, reasons=(("max_batched_tokens", "texts are not packed"),))


def plan_replica(
    spec: ModelSpec,
    shape: ModelShape,
    device: DeviceMemory,
    *,
    is_pooler: bool = False,
    weight_bytes: int | None = None,
) -> ReplicaPlan:
    """Plan a replica's memory.

    Args:
        spec: The model's entry.
        shape: The model.
        device: The device that the replica gets a share of.
        is_pooler: Whether the model classifies or embeds.
        weight_bytes: Bytes of its weights, if they are loaded.

    Raises:
        DeviceMemoryError: The share can't hold the model; the message says what to change.
        SequenceLengthError: A generator's `max_model_len` is beyond its positions.
    """
    positions, length = shape.max_positions, number(spec.entry.max_model_len)
    if not is_pooler and positions and length and length > positions:
        raise SequenceLengthError(
            f"max_model_len is {length}, but the model has {positions} positions; "
            "lower max_model_len, or write auto"
        )
    dtype = choose_dtype_name(
        shape.dtype, spec.entry.dtype, on_cpu=device.on_cpu, has_bf16=device.has_bf16
    )
    planner = SizePlanner(
        spec, shape, device, dtype, is_pooler=is_pooler, weight_bytes=weight_bytes
    )
    sizes, reasons = planner.choose_sizes()
    demand = planner.demand(sizes)
    kv = divide(spec, device, demand, sizes.max_num_seqs)
    return ReplicaPlan(shape, spec, device, dtype, sizes, demand, kv, reasons, is_pooler)


def shares_side_by_side(needs: Sequence[int], left: float = 1.0) -> list[float]:
    """Divide a card, or what is left of it, among models in proportion to what they need.

    Args:
        needs: Bytes that each model needs; see `typical_bytes`.
        left: The fraction of the card that they get.

    Returns:
        Fractions of the card, rounded down to a hundredth; together at most `left`.
    """
    least = min(MIN_SHARE, left / len(needs))
    free = left - least * len(needs)
    total = sum(needs)
    return [int(100 * (least + free * need / total) + 1e-6) / 100 for need in needs]


def typical_bytes(spec: ModelSpec, shape: ModelShape, *, is_pooler: bool) -> int:
    """Return what a model needs of a GPU to run some sequences of a common length."""
    entry = spec.entry
    given = number(entry.max_model_len) or shape.max_positions or TYPICAL_TOKENS
    step_tokens = number(entry.max_batched_tokens) or GPU_STEP_TOKENS
    sizes = Sizes(min(TYPICAL_TOKENS, given), MIN_AUTO_SEQS, step_tokens)
    dtype = choose_dtype_name(shape.dtype, spec.entry.dtype, on_cpu=False, has_bf16=True)
    planner = SizePlanner(spec, shape, DeviceMemory(0), dtype, is_pooler=is_pooler)
    demand = planner.demand(sizes)
    return demand.fixed_bytes + MIN_AUTO_SEQS * demand.sequence_bytes
