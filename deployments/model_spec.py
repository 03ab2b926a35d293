"""What a model replica is told about its model when it is made."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model, with everything that depends on the cluster resolved.

    Attributes:
        id: The name that clients ask for.
        source: An absolute folder, or the id of a hub repository.
        revision: A commit of the hub repository; None means its newest.
        dtype: auto, float32, bfloat16 or float16.
        device: auto, cpu or cuda.
        num_gpus: What Ray reserves for each replica: 0, or a share of one GPU.
        num_threads: Threads that a CPU model computes with; None means by its size.
        max_model_len: Tokens of prompt and answer together.
        max_num_seqs: Sequences that run at once, if the memory holds them.
        max_batched_tokens: Tokens in one engine step.
        max_queued_requests: Sequences that may wait behind them.
        max_queued_tokens: Tokens of those that wait: of their prompts, and what they may generate;
            None counts the requests alone.
        prefix_caching: Whether sequences share prefixes; see `EngineLimits`.
        quantization: int8, or None; see `deployments.engine.cpu.quantization`.
        cuda_graphs: Whether decode steps on a GPU are captured; see `EngineLimits`.
        tool_call_parser: auto, none, or a key of `FORMATS` in `tool_call_format`.
    """

    id: str
    source: str
    revision: str | None
    dtype: str
    device: str
    num_gpus: float
    num_threads: int | None
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    max_queued_requests: int = 64
    max_queued_tokens: int | None = None
    prefix_caching: bool = True
    quantization: str | None = None
    cuda_graphs: bool = True
    tool_call_parser: str = "auto"
