"""What a replica tells an operator: where it runs, how it is, and what its memory and work are.

The ingress reads these reports, so nothing here imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Self

from deployments.contract.claims import TenantService
from deployments.contract.telemetry.memory_report import MemoryReport
from deployments.plan.memory_budget import GIB

if TYPE_CHECKING:
    from deployments.plan.replica_plan import ReplicaPlan


MAX_REPORTED_TENANTS: Final = 64
"""The most tenants that a report names: those that waited last."""


class WaitReason(StrEnum):
    """Why a sequence waits at its replica."""

    TURN = "turn"
    """As many run as may, or others are first."""

    MEMORY = "memory"
    """The first that waits does not fit into the KV memory that is free."""

    DISPLACED = "displaced"
    """It ran, and another has taken its place."""


class ReplicaState(StrEnum):
    """How a replica that answers is, by its latest health check."""

    HEALTHY = "healthy"
    """It can serve."""

    FAILING = "failing"
    """Its health checks fail, so Serve will replace it unless one passes again."""


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """What a replica on a GPU has measured of its memory at its start, in bytes.

    Attributes:
        weight_bytes: The weights.
        captured_bytes: Captured steps, with their common pool.
        peak_bytes: The most in tensors so far: weights, KV memory and the largest step until then.
        process_bytes: All of the process on the GPU, with its CUDA context; None if the driver does
            not tell.
    """

    weight_bytes: int
    captured_bytes: int
    peak_bytes: int
    process_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a replica's memory was divided at its start, in bytes.

    Attributes:
        usable_bytes: What the plan divides: the share without what it leaves free.
        weight_bytes: The weights.
        step_bytes: The peak of a step.
        captured_bytes: Captured decode steps.
        kv_bytes: The KV memory; 0 for a pooler.
        num_kv_tokens: Tokens that the KV memory holds.
        max_model_len: The most tokens of a sequence, or of a text.
        max_num_seqs: The most sequences that run at once.
        max_batched_tokens: The most tokens of a step, or of a micro-batch.
        measured: What the start has measured of it; None on a CPU.
    """

    usable_bytes: int
    weight_bytes: int
    step_bytes: int
    captured_bytes: int
    kv_bytes: int
    num_kv_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    measured: MeasuredMemory | None = None

    @classmethod
    def of(cls, plan: "ReplicaPlan", measured: MeasuredMemory | None = None) -> Self:
        """Return what operators see of a plan, beside what was measured."""
        return cls(
            usable_bytes=plan.kv.share_bytes,
            weight_bytes=plan.demand.weight_bytes,
            step_bytes=plan.demand.activation_bytes,
            captured_bytes=plan.demand.graph_bytes,
            kv_bytes=plan.kv.kv_bytes,
            num_kv_tokens=plan.kv.num_tokens,
            max_model_len=plan.sizes.max_model_len,
            max_num_seqs=plan.sizes.max_num_seqs,
            max_batched_tokens=plan.sizes.max_batched_tokens,
            measured=measured,
        )

    @property
    def comparison(self) -> str | None:
        """The log's comparison of the plan with what was measured; None on a CPU."""
        if self.measured is None:
            return None
        measured, pairs = self.measured, list[str]()
        in_tensors = self.weight_bytes + self.step_bytes + self.kv_bytes
        for what, planned, found in (
            ("weights", self.weight_bytes, measured.weight_bytes),
            ("captured steps", self.captured_bytes, measured.captured_bytes),
            ("all tensors", in_tensors, measured.peak_bytes),
        ):
            pairs.append(f"{what} {planned / GIB:.2f} / {found / GIB:.2f} GiB")
        held = measured.process_bytes
        whole = "" if held is None else f"; the process holds {held / GIB:.2f} GiB"
        return f"memory, planned / measured so far: {', '.join(pairs)}{whole}"


@dataclass(frozen=True, slots=True)
class Waits:
    """What waits at a replica.

    Attributes:
        by_reason: How many sequences wait for each reason; empty for a pooler.
        longest_s: How long the one has waited that waits longest; 0 if none waits.
        service_gap_tokens: See `FairShares.gap`.
    """

    by_reason: Mapping[WaitReason, int] = field(default_factory=dict)
    longest_s: float = 0.0
    service_gap_tokens: float = 0.0


NO_WAITS: Final = Waits()
"""Nothing waits."""


@dataclass(frozen=True, slots=True)
class WorkCounts:
    """What a replica does and has done; None where its kind of model has no such count.

    Attributes:
        num_running: Sequences that run; of a pooler, requests that the device has taken.
        num_waiting: Sequences, or requests, that wait.
        kv_usage: The part of the KV memory that running sequences hold, 0 to 1.
        num_preempted: How often a sequence has given up its memory to wait again.
        num_moved_in: Sequences that another replica had accepted, and this one has gone on with.
        num_prompt_tokens: Prompt tokens that were looked up in the KV memory.
        num_cached_tokens: Prompt tokens found there and not computed again.
        waits: Why and how long they wait.
        tenants: What tenants got here, at most `MAX_REPORTED_TENANTS`.
    """

    num_running: int
    num_waiting: int
    kv_usage: float | None = None
    num_preempted: int | None = None
    num_moved_in: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    waits: Waits = NO_WAITS
    tenants: tuple[TenantService, ...] = ()


class SleepState(StrEnum):
    """Whether a replica holds its model's weights."""

    AWAKE = "awake"
    """It holds them."""

    FALLING_ASLEEP = "falling_asleep"
    """Their memory is being given back."""

    ASLEEP = "asleep"
    """It does not hold them; a request wakes it."""

    WAKING = "waking"
    """They are being read back."""


@dataclass(frozen=True, slots=True)
class LightSleep:
    """A replica's light sleep: its process stays, and its weights' memory is given back.

    Attributes:
        state: Whether it sleeps.
        state_unix_s: Since when.
        num_sleeps: How often it has fallen asleep.
        level: Where its weights are while it sleeps: 1 in pinned host memory, 2 in a file; None if
            it has never fallen asleep.
        awake_bytes: Memory of the process without pages of files, which processes share, on a GPU
            that of the GPU, before it last fell asleep; None if it never has.
        asleep_bytes: The same, right after.
        last_wake_s: How long it last took to wake; None if it never has.
        ends_unix_s: When its process ends unless a request wakes it, or memory gets short before;
            None while it is awake, and if the process stays.
        is_ending: Whether its process is to end now: that time has come, or memory is short.
    """

    state: SleepState
    state_unix_s: float
    num_sleeps: int = 0
    level: int | None = None
    awake_bytes: int | None = None
    asleep_bytes: int | None = None
    last_wake_s: float | None = None
    ends_unix_s: float | None = None
    is_ending: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica.

    Attributes:
        replica_id: As Serve names it.
        node: The address of its node.
        process_id: Its process on that node.
        device: The device's name.
        share: The part of the device that it may use.
        state: How it is.
        state_unix_s: Since when it is so.
        ready_unix_s: When its model was loaded.
        plan: How its memory was divided.
        memory: Its memory now and lately.
        work: What it does and has done.
        refused_user_config: Why the last `user_config` was refused; None if it applies.
        attention: How attention reads keys and values, in words; None if the engine does not say.
        light_sleep: Whether it sleeps; None unless it may.
    """

    replica_id: str
    node: str
    process_id: int
    device: str
    share: float
    state: ReplicaState
    state_unix_s: float
    ready_unix_s: float
    plan: MemoryPlan
    memory: MemoryReport
    work: WorkCounts
    refused_user_config: str | None = None
    attention: str | None = None
    light_sleep: LightSleep | None = None
