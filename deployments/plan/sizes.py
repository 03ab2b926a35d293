"""Chooses the sizes of a replica that its model's entry leaves open (`auto`).

As many sequences, and as long ones, as the replica's share of its device holds: each choice is
tried with the memory that the model would need (`memory_demand`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from deployments.contract.model_spec import MAX_AUTO_SEQS, ModelSpec, number
from deployments.plan.graph_sizes import MAX_GRAPHS
from deployments.plan.memory_budget import (
    OUTSIDE_BYTES,
    POOLER_STEP_TOKENS,
    DeviceMemoryError,
    KVPlan,
    MemoryDemand,
    plan_kv_blocks,
)
from deployments.plan.memory_demand import memory_demand
from deployments.plan.model_shape import ModelShape, step_dtype

CPU_SEQS: Final = 16
"""What `max_num_seqs: auto` means on a CPU, where more sequences make each of them slower."""

MIN_AUTO_SEQS: Final = 8
TOKENS_PER_AUTO_SEQ: Final = 1024
"""`max_num_seqs: auto` is halved until the KV memory holds this many tokens of each sequence."""

GPU_STEP_TOKENS: Final = 2048
CPU_STEP_TOKENS: Final = 512
POOLER_GPU_STEPS: Final = (16_384, 8192, 4096)
"""What `max_batched_tokens: auto` means: it fills a step of a GPU, and on a CPU it does not
make those that decode wait for too long. Of a pooler on a GPU that packs texts it is the first of
`POOLER_GPU_STEPS` that leaves most of the memory free: RoBERTa-large's shape classified 815, 2,389
and 2,552 texts of 256 tokens a second in batches of 2,048, 8,192 and 16,384 tokens on an H100."""

NO_LIMIT_LEN: Final = 4096
"""What `max_model_len: auto` means for a model whose configuration names no limit."""

MIN_AUTO_LEN: Final = 2048
"""A length that `max_model_len: auto` does not go below: less memory is an error instead."""

CPU_KV_FRACTION: Final = 0.25
"""What `kv_cache_memory_bytes: auto` is on a CPU: this part of the machine's memory, of which other
programs need the rest."""

STEP_FRACTION: Final = 0.25
"""What a step may take of the memory beside the weights, if `max_model_len: auto` decides: a prompt
with images runs in one step, so its length is paid in memory that could hold keys and values."""

LENGTH_STEP: Final = 256


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a replica runs with.

    Attributes:
        max_model_len: The most tokens of prompt and answer together, or of one text.
        max_num_seqs: The most sequences that run at once; 1 for a pooler.
        max_batched_tokens: The most tokens of a step, or of a micro-batch.
    """

    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device, as far as a plan needs it.

    Attributes:
        total_bytes: The memory that shares are fractions of. On a CPU it is what is free now.
        foreign_bytes: What others hold of it.
        on_cpu: Whether it is the machine's own memory.
        has_bf16: Whether it computes in bfloat16; every GPU that is served does.
        whole_bytes: On a CPU, all memory of the machine or container; None for `total_bytes`.
    """

    total_bytes: int
    foreign_bytes: int = 0
    on_cpu: bool = False
    has_bf16: bool = True
    whole_bytes: int | None = None

    @property
    def left_bytes(self) -> int:
        """What others leave of it."""
        return max(0, self.total_bytes - self.foreign_bytes)

    def max_kv_bytes(self, spec: ModelSpec) -> int | None:
        """Return the most that keys and values may take; None for all that the share holds."""
        given = number(spec.entry.kv_cache_memory_bytes)
        if given is not None or not self.on_cpu:
            return given
        return int(CPU_KV_FRACTION * (self.whole_bytes or self.total_bytes))


class SizePlanner:
    """Chooses the sizes that an entry leaves open."""

    def __init__(
        self,
        spec: ModelSpec,
        shape: ModelShape,
        device: DeviceMemory,
        dtype: str,
        *,
        is_pooler: bool,
        weight_bytes: int | None = None,
    ) -> None:
        """Plan a replica; see `plan_replica`."""
        self._spec = spec
        self._shape = shape
        self._device = device
        self._dtype = dtype
        self._is_pooler = is_pooler
        if weight_bytes is None:
            weight_bytes = shape.weights.num_bytes(
                dtype,
                on_cpu=device.on_cpu,
                quantization=spec.entry.quantization,
                has_bf16=device.has_bf16,
            )
        self._weight_bytes = weight_bytes

    def demand(self, sizes: Sizes) -> MemoryDemand:
        """Return what the model needs with these sizes."""
        entry, on_gpu = self._spec.entry, not self._device.on_cpu
        step_tokens = sizes.max_batched_tokens
        if self._is_pooler:
            step_tokens = max(step_tokens, sizes.max_model_len)  # a text can't be split
        found = memory_demand(
            self._shape,
            weight_bytes=self._weight_bytes,
            dtype=self._dtype,
            step_dtype=step_dtype(self._dtype, entry.quantization, has_bf16=self._device.has_bf16),
            max_model_len=sizes.max_model_len,
            max_num_seqs=sizes.max_num_seqs,
            max_batched_tokens=step_tokens,
            max_graphs=MAX_GRAPHS if on_gpu and entry.cuda_graphs and not self._is_pooler else 0,
            on_gpu=on_gpu,
        )
        return replace(found, groups=()) if self._is_pooler else found

    def choose_sizes(self) -> tuple[Sizes, tuple[tuple[str, str], ...]]:
        """Return the sizes, and why those that were chosen are what they are."""
        for num_seqs, why in self._numbers_of_seqs():
            sizes, reasons = self._sizes_with(num_seqs)
            if why is not None:
                reasons["max_num_seqs"] = why
            kv = self._division(self.demand(sizes), sizes)
            if kv is not None and kv.num_tokens >= num_seqs * min(
                sizes.max_model_len, TOKENS_PER_AUTO_SEQ
            ):
                break
        return sizes, tuple(reasons.items())

    def _numbers_of_seqs(self) -> Iterator[tuple[int, str | None]]:
        """Yield numbers of sequences to try, and why each would be chosen; None if it is given."""
        entry = self._spec.entry
        if self._is_pooler:
            yield 1, None
        elif entry.max_num_seqs != "auto":
            yield entry.max_num_seqs, None
        else:
            usual = CPU_SEQS if self._device.on_cpu else MAX_AUTO_SEQS
            num_seqs = min(usual, number(entry.max_batched_tokens) or usual)
            yield num_seqs, self._usual if num_seqs == usual else "as many as a step has tokens"
            while num_seqs > MIN_AUTO_SEQS and not self._device.on_cpu:
                num_seqs //= 2
                yield num_seqs, "what the KV memory holds"

    @property
    def _usual(self) -> str:
        return f"the value for a {'CPU' if self._device.on_cpu else 'GPU'}"

    def _sizes_with(self, num_seqs: int) -> tuple[Sizes, dict[str, str]]:
        entry, reasons = self._spec.entry, dict[str, str]()
        num_tokens = number(entry.max_batched_tokens)
        if num_tokens is None:
            num_tokens = max(self._step_tokens, num_seqs)
            reasons["max_batched_tokens"] = self._usual
        length = number(entry.max_model_len)
        if length is None:
            length, reasons["max_model_len"] = self._choose_length(num_seqs, num_tokens)
        elif self._is_pooler:
            length = min(length, self._shape.max_positions or length)
        return Sizes(length, num_seqs, num_tokens), reasons

    @property
    def _step_tokens(self) -> int:
        if self._is_pooler:
            is_packed = not self._device.on_cpu and self._shape.reads_by_length(self._dtype)
            steps = POOLER_GPU_STEPS if is_packed else ()
            fitting = (n for n in steps if self._is_comfortable(Sizes(1, 1, n)))
            return next(fitting, POOLER_STEP_TOKENS)
        return CPU_STEP_TOKENS if self._device.on_cpu else GPU_STEP_TOKENS

    def _choose_length(self, num_seqs: int, num_tokens: int) -> tuple[int, str]:
        """Return the longest length up to the model's own that fits, and why it is that."""
        own, why = self._shape.max_positions or NO_LIMIT_LEN, "the model's own limit"
        if self._is_pooler and own > NO_LIMIT_LEN:
            own, why = NO_LIMIT_LEN, "enough for one text"
        lengths = [
            own,
            *range((own - 1) // LENGTH_STEP * LENGTH_STEP, MIN_AUTO_LEN - 1, -LENGTH_STEP),
        ]
        first, last = 0, len(lengths) - 1
        while first < last:  # the shortest one may not fit either; the plan says so
            middle = (first + last) // 2
            if self._is_comfortable(Sizes(lengths[middle], num_seqs, num_tokens)):
                last = middle
            else:
                first = middle + 1
        return lengths[first], why if first == 0 else "the longest that fits"

    def _is_comfortable(self, sizes: Sizes) -> bool:
        """Return whether the model fits with these sizes, and its steps leave room for keys."""
        demand = self.demand(sizes)
        kv = self._division(demand, sizes)
        if kv is None:
            return False
        if self._device.on_cpu:
            limit_bytes = self._device.max_kv_bytes(self._spec)
            return limit_bytes is None or sizes.max_num_seqs * demand.sequence_bytes <= limit_bytes
        if not (self._shape.has_images or self._is_pooler):
            return True  # a prompt of any length runs in chunks
        left_bytes = kv.share_bytes - demand.weight_bytes
        return demand.activation_bytes <= STEP_FRACTION * left_bytes

    def _division(self, demand: MemoryDemand, sizes: Sizes) -> KVPlan | None:
        """Return the division of the share; None if the model does not fit."""
        try:
            return divide(self._spec, self._device, demand, sizes.max_num_seqs)
        except DeviceMemoryError:
            return None


def divide(
    spec: ModelSpec, device: DeviceMemory, demand: MemoryDemand, max_num_seqs: int
) -> KVPlan:
    """Return how a replica's share of its device is divided.

    Raises:
        DeviceMemoryError: The share can't hold the model; the message says what to change.
    """
    return plan_kv_blocks(
        total_bytes=device.total_bytes,
        share=spec.device_share,
        demand=demand,
        max_num_seqs=max_num_seqs,
        foreign_bytes=device.foreign_bytes,
        sleeper_bytes=0 if device.on_cpu else (spec.num_turns - 1) * OUTSIDE_BYTES,
        max_kv_bytes=device.max_kv_bytes(spec),
    )
