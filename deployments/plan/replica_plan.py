"""The memory plan of one replica, from its model's configuration: before anything is loaded.

Chooses the sizes that the configuration leaves open (`auto`), and divides the replica's share of
its device among weights, a step and KV memory. A replica plans so before it loads; `raystream plan`
prints the same for any card. Nothing here imports torch.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from huggingface_hub import get_safetensors_metadata, try_to_load_from_cache
from safetensors import safe_open

from deployments.contract.model_spec import MAX_AUTO_SEQS, ModelSpec, number
from deployments.plan.graph_sizes import MAX_GRAPHS
from deployments.plan.memory_budget import (
    GIB,
    POOLER_STEP_TOKENS,
    TYPICAL_TOKENS,
    DeviceMemoryError,
    KVPlan,
    MemoryDemand,
    plan_kv_blocks,
)
from deployments.plan.memory_demand import memory_demand
from deployments.plan.model_shape import ModelShape, choose_dtype_name, step_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

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

MIN_SHARE: Final = 0.05
"""The least that a model gets of a card: a process holds some hundred MiB there before it loads."""


class SequenceLengthError(ValueError):
    """A given length is beyond the model's positions."""


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
        """Return the plan with the weights that were really loaded; sizes may be chosen anew.

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
    planner = _Planner(spec, shape, device, dtype, is_pooler=is_pooler, weight_bytes=weight_bytes)
    sizes, reasons = planner.choose_sizes()
    demand = planner.demand(sizes)
    kv = _divide(spec, device, demand, sizes.max_num_seqs)
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
    planner = _Planner(spec, shape, DeviceMemory(0), dtype, is_pooler=is_pooler)
    demand = planner.demand(sizes)
    return demand.fixed_bytes + MIN_AUTO_SEQS * demand.sequence_bytes


def counted_shape(
    config: "PreTrainedConfig", source: str, revision: str | None, *, is_pooler: bool
) -> ModelShape:
    """Return a model's sizes, with the weights that its files hold if their headers can be read.

    Args:
        config: Its configuration.
        source: See `count_weights`.
        revision: See `count_weights`.
        is_pooler: Whether the model classifies or embeds.

    Raises:
        ValueError: The configuration lacks a size.
    """
    shape = ModelShape.of(config, is_pooler=is_pooler)
    # The files of weights that are dequantized hold fewer numbers.
    is_quantized = getattr(config, "quantization_config", None) is not None
    counted = None if is_quantized else count_weights(source, revision)
    return shape if counted is None else shape.with_counted(counted)


def count_weights(source: str, revision: str | None = None) -> int | None:
    """Return the number of weights in a model's files, from their headers.

    Args:
        source: A folder, a configuration's file, or the id of a hub repository, of which only some
            kilobytes are read if it is not in the cache.
        revision: A commit of the hub repository.

    Returns:
        The number, or None if there are no files, they are damaged, or the hub can't be reached.
    """
    folder: Path | None = Path(source)
    if Path(source).is_file():
        return None  # a configuration by itself
    try:
        if not Path(source).is_dir():
            cached = try_to_load_from_cache(source, "config.json", revision=revision)
            folder = Path(cached).parent if isinstance(cached, str) else None
        if folder is not None and (files := _weight_files(folder)):
            return sum(map(_num_weights_in, files))
        if Path(source).is_dir():
            return None
        found = get_safetensors_metadata(source, revision=revision)
        return sum(found.parameter_count.values())
    except Exception as error:  # noqa: BLE001 - an estimate does, too; loading tells what is wrong
        logger.debug("the sizes of %s can't be read: %s", source, error)
        return None


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would load; none if one of them is missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    files = [folder / name for name in sorted(names)]
    return files if all(file.is_file() for file in files) else []


def _num_weights_in(file: Path) -> int:
    with safe_open(file, framework="numpy") as tensors:
        return sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - it is no mapping


class _Planner:
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
            return _divide(self._spec, self._device, demand, sizes.max_num_seqs)
        except DeviceMemoryError:
            return None


def _divide(
    spec: ModelSpec, device: DeviceMemory, demand: MemoryDemand, max_num_seqs: int
) -> KVPlan:
    return plan_kv_blocks(
        total_bytes=device.total_bytes,
        share=spec.device_share,
        demand=demand,
        max_num_seqs=max_num_seqs,
        foreign_bytes=device.foreign_bytes,
        max_kv_bytes=device.max_kv_bytes(spec),
    )
