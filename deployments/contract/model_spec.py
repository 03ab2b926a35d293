"""The settings that a model replica is created with."""

import os
from dataclasses import dataclass
from typing import Final, Literal

from deployments.contract.tracing import TracingSettings

MAX_AUTO_SEQS: Final = 256
"""The most sequences that run at once if a replica may choose; vLLM's default is the same."""

Task = Literal["generate", "classify", "embed"]
"""What a model does."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model, with all settings that depend on the cluster resolved.

    Attributes:
        id: The name that clients ask for.
        source: An absolute folder, or the id of a hub repository.
        revision: A commit of the hub repository; None means the newest.
        dtype: auto, float32, bfloat16 or float16.
        device: auto, cpu or cuda.
        num_gpus: What Ray reserves for each replica: 0, or a share of one GPU.
        num_threads: Threads that a CPU model computes with; None means chosen by its size.
        max_model_len: The most tokens of prompt and answer together. None, here and in the next
            two, lets each replica choose by its device; see `deployments.plan.replica_plan`.
        max_num_seqs: The most sequences that run at once, if their tokens fit into the KV memory.
        max_batched_tokens: The most tokens of one engine step, or of a pooler's micro-batch.
        kv_cache_memory_bytes: The most that keys and values take; None, here too, for what suits
            the device.
        max_queued_requests: The most requests that may wait. A text model counts sequences: each
            prompt of an HTTP request counts once per answer (`n`). A pooler counts HTTP
            requests, whatever their number of texts.
        max_queued_tokens: The most tokens that may wait. A text model counts each sequence's prompt
            and the tokens that it may generate. None means no limit on tokens.
        prefix_caching: Whether sequences share prefixes; see `EngineLimits`.
        quantization: int8, int4, or None; see `deployments.compute.cpu.linear.quantization`.
        cuda_graphs: Whether decode steps on a GPU are captured; see `EngineLimits`.
        tool_call_parser: auto, none or a key of `FORMATS` in `tool_call_format`.
        reasoning_parser: auto, none or a key of `REASONING_FORMATS` in `reasoning_format`.
        task: What the model does.
        tracing: Where the replicas' spans go; None turns tracing off.
    """

    id: str
    source: str
    revision: str | None
    dtype: str
    device: str
    num_gpus: float
    num_threads: int | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_batched_tokens: int | None
    kv_cache_memory_bytes: int | None = None
    max_queued_requests: int = 64
    max_queued_tokens: int | None = None
    prefix_caching: bool = True
    quantization: str | None = None
    cuda_graphs: bool = True
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    task: Task = "generate"
    tracing: TracingSettings | None = None

    @property
    def root(self) -> str:
        """The hub repository of the model's files; for a folder, the id, to show no path."""
        return self.id if os.path.isabs(self.source) else self.source

    @property
    def device_share(self) -> float:
        """The fraction of the device's memory that a replica may use; 1 on a CPU."""
        return self.num_gpus or 1.0
