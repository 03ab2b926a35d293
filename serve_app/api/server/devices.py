"""`GET /v1/devices`: the memory, the load and the state of every model's replicas.

It shows what all users do, so it is for operators (`serve_app.keys.access`). It wakes no model: one
that sleeps has no replicas to show.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, ConfigDict, Field

from deployments.contract.descriptions import Task
from deployments.contract.telemetry.memory_report import Watched
from deployments.contract.telemetry.metric_store import Snapshot
from deployments.contract.telemetry.start_progress import StartPhase
from deployments.plan.replica_report import ReplicaState, SleepState, WaitReason
from serve_app.api.requests.context import ApiContext
from serve_app.backends.models.devices import ModelDevices
from serve_app.backends.models.serving_states import ServingState
from serve_app.metrics import PARKED


class Figures(BaseModel):
    """Figures that a replica reports."""

    model_config = ConfigDict(from_attributes=True)


class Measured(Figures):
    """What a replica on a GPU has measured at its start, beside its plan."""

    weight_bytes: int
    captured_bytes: int = Field(description="Captured steps, with their common pool.")
    peak_bytes: int = Field(
        description="The most in tensors so far: weights, keys and values, and the largest step."
    )
    process_bytes: int | None = Field(
        description="All of the replica on the GPU, with its CUDA context; null if not known."
    )


class Plan(Figures):
    """How a replica's memory was divided at its start, and the sizes that it runs with."""

    usable_bytes: int = Field(description="The share without what the plan leaves free.")
    weight_bytes: int
    step_bytes: int = Field(description="The peak of a step.")
    captured_bytes: int = Field(description="Captured decode steps.")
    kv_bytes: int = Field(description="Keys and values; 0 unless the model generates.")
    num_kv_tokens: int = Field(description="Tokens that the KV memory holds.")
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    measured: Measured | None = Field(
        description="What the start has measured; all else is planned. null on a CPU."
    )


class Use(Figures):
    """The latest sample; null where a figure is not known."""

    device_total_bytes: int | None = Field(
        description="The GPU's memory; on a CPU the container's limit, or the machine's."
    )
    device_used_bytes: int | None = Field(description="Used by all processes.")
    process_bytes: int | None = Field(
        description="Used by the replica: on a GPU with its CUDA context; on a CPU, resident."
    )
    allocated_bytes: int | None = Field(description="On a GPU: in tensors.")
    reserved_bytes: int | None = Field(description="On a GPU: held by torch's allocator.")
    peak_bytes: int | None = Field(
        description="The most so far of `allocated_bytes`; on a CPU of `process_bytes`."
    )
    fragmented_bytes: int | None = Field(description="On a GPU: reserved, but in no tensor.")


class History(Figures):
    """Columns of equal length, a sample a second, the oldest first; null: never known."""

    unix_s: list[float] = Field(description="When each sample was taken, in Unix seconds.")
    device_used_bytes: list[int | None] | None
    process_bytes: list[int | None] | None
    allocated_bytes: list[int | None] | None
    reserved_bytes: list[int | None] | None


class ShortMemory(Figures):
    """Memory is short, or was."""

    of: Watched = Field(
        description="`device`: what all processes use of the device. `share`: what the replica's "
        "allocator holds of its share of a GPU."
    )
    used_bytes: int = Field(description="In use when the warning began.")
    limit_bytes: int
    began_unix_s: float
    ended_unix_s: float | None = Field(description="null: it lasts.")


class Memory(Figures):
    """The memory of a replica and of its device."""

    use: Use
    share_bytes: int | None = Field(description="The share of a GPU; null on a CPU.")
    warn_from: float = Field(description="The part in use from which a warning begins.")
    warn_below: float = Field(description="The part in use below which it ends.")
    warnings: list[ShortMemory] = Field(description="Those that last, and the latest that ended.")
    history: History


class Waits(Figures):
    """Why and how long sequences wait at a replica."""

    by_reason: dict[WaitReason, int] = Field(
        description="How many wait. `turn`: as many run as may. `memory`: the next does not fit "
        "into the KV memory that is free. `displaced`: they ran, and gave their places to better "
        "priorities, or to keys with less than their shares. Empty unless the model generates."
    )
    longest_s: float = Field(description="How long the one waits that waits longest.")
    service_gap_tokens: float = Field(
        description="Weighted tokens between the most and the least served of the keys that wait, "
        "by their weights."
    )


class KeyShare(Figures):
    """What a key got of a replica."""

    tenant: str = Field(
        serialization_alias="key",
        description="The key's name, or `gateway:` and a gateway's tenant; empty without both.",
    )
    weight: float
    num_waiting: int = Field(description="Its requests that wait for service.")
    served_tokens: float = Field(
        description="Tokens of prompts that were computed for it, and twice those of answers."
    )


class Work(Figures):
    """What a replica does and has done; null where its kind of model has no such count."""

    num_running: int = Field(description="Sequences; unless the model generates, requests.")
    num_waiting: int
    kv_usage: float | None = Field(description="The part of the KV memory in use, 0 to 1.")
    num_preempted: int | None = Field(
        description="How often a sequence has given up its memory to wait again."
    )
    num_moved_in: int | None = Field(description="Sequences that came from other replicas.")
    num_prompt_tokens: int | None = Field(
        description="Prompt tokens looked up in the KV memory (prefix queries)."
    )
    num_cached_tokens: int | None = Field(
        description="Prompt tokens found there and not computed again (prefix hits)."
    )
    waits: Waits
    tenants: list[KeyShare] = Field(
        serialization_alias="keys",
        description="What each key got, at most 64: those that waited last.",
    )


class LightSleep(Figures):
    """A replica that may sleep lightly: its process stays, without the memory of its weights."""

    state: SleepState = Field(
        description="`awake`; `falling_asleep`: memory is being given back; `asleep`: a request "
        "wakes it; `waking`: its weights are being read back."
    )
    state_unix_s: float = Field(description="Since when it is so, in Unix seconds.")
    num_sleeps: int = Field(description="How often it has fallen asleep.")
    level: int | None = Field(
        description="Where its weights are while it sleeps: 1 in pinned host memory, 2 in a file; "
        "null if it has never fallen asleep."
    )
    awake_bytes: int | None = Field(
        description="Memory of its process without pages of files, which processes share, on a GPU "
        "that of the GPU, before it last fell asleep; null if it never has."
    )
    asleep_bytes: int | None = Field(description="The same, right after.")
    last_wake_s: float | None = Field(
        description="How long it last took to wake; null if it never has."
    )
    ends_unix_s: float | None = Field(
        description="When its process ends unless a request wakes it, or the machine's memory gets "
        "short before; null while it is awake, and if the process stays."
    )
    is_ending: bool = Field(
        description="Whether its process is to end now: that time has come, or memory is short."
    )


class Replica(Figures):
    """A replica that has answered."""

    replica_id: str
    node: str = Field(description="The address of its node.")
    process_id: int
    device: str
    share: float = Field(description="The part of the device that it may use.")
    state: ReplicaState = Field(description="By its latest health check.")
    state_unix_s: float = Field(description="Since when it is so, in Unix seconds.")
    ready_unix_s: float = Field(description="When its model was loaded, in Unix seconds.")
    plan: Plan
    memory: Memory
    work: Work
    refused_user_config: str | None = Field(
        description="Why the last `user_config` was refused, so that the earlier settings apply; "
        "null if it applies."
    )
    attention: str | None = Field(
        description="How attention reads keys and values: on a GPU by length (flash attention) or "
        "by masks, and why; null if the engine does not say."
    )
    light_sleep: LightSleep | None = Field(
        description="Whether it sleeps; null unless it may sleep lightly."
    )


class Start(Figures):
    """How far a replica is that has not started yet."""

    replica_id: str
    phase: StartPhase
    phase_unix_s: float = Field(description="Since when it is in this phase, in Unix seconds.")
    unix_s: float = Field(description="When it has reported this, in Unix seconds.")
    num_bytes: int = Field(description="Downloaded.")
    total_bytes: int = Field(description="To download, or of the weights to load.")
    bytes_per_s: float | None = Field(
        description="The rate of the last ten seconds; null unless it downloads."
    )
    num_files: int = Field(description="Downloaded.")
    total_files: int = Field(description="To download, or that hold the weights (shards).")
    num_tensors: int = Field(description="Loaded.")
    total_tensors: int = Field(description="To load; 0 until that is known.")


class Model(Figures):
    """A model and its replicas."""

    id: str
    object: Literal["model.devices"] = "model.devices"
    task: Task
    state: ServingState = Field(
        description="`asleep`: nobody uses it, and a request wakes it: no replica runs and none is "
        "wanted, or all that answer sleep lightly."
    )
    pinned: bool = Field(description="Whether an operator keeps a replica running, used or not.")
    going_to_sleep: bool = Field(
        description="Whether the replicas end once they have nothing to do, because an operator "
        "wants it."
    )
    status: str = Field(description="Serve's word for the state of the deployment.")
    message: str = Field(description="Serve's explanation, as of a start that has failed.")
    num_replicas: dict[str, int] = Field(
        description="Replicas in each of Serve's states: STARTING, RUNNING, STOPPING and others."
    )
    num_parked: int = Field(
        description="Streams of the model and of its adapters that have begun, hold no memory of a "
        "replica and wait to go on, at all ingresses."
    )
    num_started: int = Field(
        description="Replicas that have run since the ingress that answers began to look; more "
        "than run now if some were replaced or scaled down."
    )
    replicas: list[Replica] = Field(description="Those that run and have answered.")
    starting: list[Start] = Field(
        description="How far those are that download or load the model, or warm it up."
    )
    silent_replicas: list[str] = Field(
        description="The ids of those that run and have not answered in two seconds."
    )

    @classmethod
    def of(cls, model: ModelDevices, parked: Mapping[str, int]) -> "Model":
        """Return the description of a model.

        Args:
            model: The model.
            parked: See `num_parked_of`.
        """
        return cls(
            id=model.id,
            task=model.task,
            state=model.serving,
            pinned=model.state.is_pinned,
            going_to_sleep=model.state.is_going_to_sleep,
            status=model.state.status,
            message=model.state.message,
            num_replicas=dict(model.state.num_replicas),
            num_parked=sum(parked.get(id_, 0) for id_ in (model.id, *model.adapter_ids)),
            num_started=model.replicas.num_started,
            replicas=[Replica.model_validate(each) for each in model.replicas.reports],
            starting=[Start.model_validate(each) for each in model.starting],
            silent_replicas=list(model.replicas.silent),
        )


class DeviceList(BaseModel):
    """All models with their replicas."""

    object: Literal["list"] = "list"
    data: list[Model]


class DevicesApi:
    """Shows operators the memory and the replicas."""

    def __init__(self, context: ApiContext) -> None:
        self._devices = context.devices
        self._operators = context.operators
        self._snapshots = context.snapshots
        self._rendered: tuple[tuple[ModelDevices, ...], Mapping[str, int], bytes] | None = None

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(tags=["devices"], dependencies=[Depends(self._operators.require)])
        router.add_api_route(
            "/v1/devices",
            self.list_devices,
            summary="Show the memory and the state of all replicas",
            response_model=DeviceList,
        )
        return router

    async def list_devices(self) -> Response:
        """Show each model with its replicas, as they were at most a second ago.

        Replicas that don't answer are named; nothing waits for them for longer than two seconds.
        """
        found, snapshots = await asyncio.gather(self._devices.latest(), self._snapshots.all())
        parked = num_parked_of(snapshots)
        if self._rendered is None or found is not self._rendered[0] or parked != self._rendered[1]:
            listed = DeviceList(data=[Model.of(each, parked) for each in found])
            self._rendered = found, parked, listed.model_dump_json(by_alias=True).encode()
        return Response(self._rendered[2], media_type="application/json")


def num_parked_of(snapshots: Iterable[Snapshot]) -> dict[str, int]:
    """Return how many streams of each model, and of each adapter, are parked at all ingresses."""
    parked = Counter[str]()
    for snapshot in snapshots:
        for (model_id,), (number,) in snapshot.series.get(PARKED.name, ()):
            parked[model_id] += int(number)
    return dict(parked)
