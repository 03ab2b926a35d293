"""The arguments of vLLM that a model's `engine_args` may set, and why it may not set the others.

vLLM's `AsyncEngineArgs` has more than 250 fields. An allowlist: what is added there is refused here
until it is known to leave streams movable, weights safetensors, and code the server's own. Knows
nothing of vLLM, so that a file is checked where none is installed. `deployments.vllm_engine` makes
vLLM's own object of what is given.

Source: vllm.engine.arg_utils.EngineArgs of vLLM 0.32
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from deployments.contract.strict_model import StrictModel

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
"""A word of vLLM's own, of which each version has others."""

LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
"""The ranks that vLLM makes room for."""

ENTRY_KEYS: Final[Mapping[str, str]] = {
    "dtype": "dtype",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_batched_tokens",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "enable_prefix_caching": "prefix_caching",
}
"""Keys of a model's entry by the names that vLLM has for them."""

DEFAULT_UTILIZATION: Final = 0.92
"""What vLLM takes of a GPU that it has for itself: its own default."""

_REASONS: Final[Mapping[str, str]] = {
    "code of models is never run here": "trust_remote_code code_revision",
    "weights are only read from safetensors; other formats can hold code": (
        "load_format model_loader_extra_config ignore_patterns pt_load_map_location"
    ),
    "raystream's own stands there; with another, no stream could move to another replica": (
        "scheduler_cls logits_processors scheduling_policy async_scheduling logprobs_mode seed"
    ),
    "no class of another's runs in the engine": (
        "worker_cls worker_extension_cls io_processor_plugin reasoning_parser_plugin "
        "weight_transfer_config"
    ),
    "a model is what its config.json says": (
        "hf_overrides model_class_overrides hf_config_path config_format model_impl"
    ),
    "write `source` and `revision` in the model's entry": (
        "model model_weights tokenizer revision tokenizer_revision download_dir hf_token"
    ),
    "write `id` in the model's entry": "served_model_name",
    "write `task` in the model's entry": "runner convert pooler_config",
    "the server reads media itself, as `limits:` says": (
        "allowed_local_media_path allowed_media_domains media_io_kwargs enable_mm_embeds "
        "interleave_mm_strings"
    ),
    "the server tokenizes prompts, and knows the model's own sampling": (
        "skip_tokenizer_init tokenizer_mode enable_prompt_embeds tokens_only generation_config "
        "override_generation_config max_logprobs"
    ),
    "raystream compiles grammars; write `reasoning_parser` in the model's entry": (
        "structured_outputs_config reasoning_parser reasoning_config"
    ),
    "drafted tokens are not drawn as raystream draws, so no stream could move": (
        "speculative_config spec_method spec_model spec_tokens"
    ),
    "write `distributed_executor_backend: ray`, and Ray finds GPUs for the workers on any nodes": (
        "nnodes node_rank master_addr master_port device_ids ray_workers_use_nsight"
    ),
    "write `num_replicas` under `deployments:`": (
        "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local "
        "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb "
        "data_parallel_external_lb data_parallel_backend"
    ),
    "keys and values stay in one replica": (
        "kv_transfer_config kv_events_config ec_transfer_config kv_offloading_size "
        "kv_offloading_backend"
    ),
    "write `max_queued_requests` and `max_queued_tokens` in the model's entry": (
        "max_num_queued_reqs max_num_queued_tokens max_num_active_seqs"
    ),
    "logs, metrics and traces are raystream's": (
        "disable_log_stats enable_log_requests aggregate_engine_logging otlp_traces_endpoint "
        "collect_detailed_traces log_level log_config_file logging_config profiler_config"
    ),
    "write `light_sleep_after_s` in the model's entry": "enable_sleep_mode",
    "what it holds is not checked; enforce_eager, attention_backend and the cudagraph keys can be "
    "set": "compilation_config additional_config kernel_config attention_config",
}


class VllmArgs(StrictModel):
    """What a model's `engine_args` sets, by vLLM's own names; None is vLLM's default."""

    refused_keys: ClassVar[Mapping[str, str]] = {
        name: reason for reason, names in _REASONS.items() for name in names.split()
    }

    tensor_parallel_size: int | None = Field(default=None, ge=1, le=64)
    """GPUs that each layer is divided among."""
    pipeline_parallel_size: int | None = Field(default=None, ge=1, le=64)
    """Groups of layers, each on GPUs of its own. A replica has tensor_parallel_size x
    pipeline_parallel_size GPUs, all on one node unless distributed_executor_backend says `ray`.
    """
    distributed_executor_backend: Literal["mp", "ray"] | None = None
    """What starts the workers of a divided model: with `mp`, the default, vLLM does, on the
    replica's node; with `ray` Ray does, on any nodes that have a GPU for each, as few as it can.
    """
    enable_expert_parallel: bool | None = None
    """Whether these GPUs divide a mixture's experts instead of each expert's layers."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """The entry's `dtype`; like the other five keys of which this is said, it can stand in either
    place, and not in both.
    """
    quantization: Name | None = None
    """How the weights are quantized. vLLM finds AWQ, GPTQ and FP8 in the model's files; `fp8`
    quantizes others at the start.
    """
    kv_cache_dtype: Name | None = None
    """The type of keys and values: `fp8` halves their memory, and changes texts."""
    max_model_len: int | None = Field(default=None, ge=2)
    """The entry's `max_model_len`."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """The entry's `max_num_seqs`."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """The entry's `max_batched_tokens`."""
    long_prefill_token_threshold: int | None = Field(default=None, ge=0)
    """Prompts with more tokens count as long, and run in smaller parts."""
    enable_chunked_prefill: bool | None = None
    """Whether prompts are run in parts, beside the tokens of other sequences."""
    enable_prefix_caching: bool | None = None
    """The entry's `prefix_caching`."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """The part of each GPU that vLLM takes for weights, steps, keys and values. Without it: 0.92 of
    the replica's share.
    """
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    """The entry's `kv_cache_memory_bytes`."""
    block_size: int | None = Field(default=None, ge=1, le=1024)
    """Tokens in one block of keys and values."""
    cpu_offload_gb: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """GiB of weights that stay in the machine's memory, and are copied to the GPU in every step."""
    enforce_eager: bool | None = None
    """Whether the model is neither compiled nor captured: it starts faster and runs slower."""
    cudagraph_capture_sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Sizes of a batch for which steps are captured."""
    max_cudagraph_capture_size: int | None = Field(default=None, ge=0)
    """The largest of these sizes."""
    attention_backend: Name | None = None
    """The kernels that attention runs with, such as `FLASH_ATTN`."""
    moe_backend: Name | None = None
    """The kernels that a mixture's experts run with."""
    disable_custom_all_reduce: bool | None = None
    """Whether GPUs add up their results by NCCL only."""
    enable_lora: bool | None = None
    """Whether LoRA adapters can be loaded."""
    max_loras: int | None = Field(default=None, ge=1)
    """The most adapters in one step."""
    max_lora_rank: LoraRank | None = None
    """The highest rank of an adapter."""
    max_cpu_loras: int | None = Field(default=None, ge=1)
    """The most adapters that are kept in the machine's memory."""
    limit_mm_per_prompt: dict[Name, Annotated[int, Field(ge=0)]] | None = None
    """The most inputs of each kind in a prompt, such as `{image: 4}`."""
    mm_processor_cache_gb: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """GiB that keep images that were processed."""

    @property
    def given(self) -> dict[str, Any]:
        """The arguments that are set, by vLLM's names."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def num_workers(self) -> int:
        """How many devices one replica computes on."""
        return (self.tensor_parallel_size or 1) * (self.pipeline_parallel_size or 1)

    @property
    def uses_ray(self) -> bool:
        """Whether Ray starts the workers, on GPUs of any nodes; the replica itself has none."""
        return self.distributed_executor_backend == "ray"

    def utilization(self, share: float) -> float:
        """Return the part of a GPU that vLLM takes.

        Args:
            share: The replica's share of the GPU, above 0 to 1.
        """
        return self.gpu_memory_utilization or DEFAULT_UTILIZATION * share
