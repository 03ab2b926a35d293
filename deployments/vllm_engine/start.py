"""Starts vLLM's engine for a model's entry, or says in one line why it can't."""

import builtins
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import vllm
from pydantic import ValidationError
from ray.runtime_context import get_runtime_context
from transformers import GenerationConfig
from vllm.config import ModelConfig as VllmModelConfig
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase

from deployments.compute.hub_files import download_files
from deployments.compute.model_files import read_settings
from deployments.compute.tokenizer_files import load_tokenizer
from deployments.contract.model_spec import MAX_AUTO_SEQS, ModelSpec, number
from deployments.contract.telemetry.start_progress import StartPhase, StartProgress
from deployments.contract.unsupported_model import UnsupportedModelError, reason_of
from deployments.engine.limits import EngineLimits
from deployments.generator.fingerprint import content_digest, package_versions
from deployments.generator.text_engine import EngineFacts
from deployments.plan import cgroup
from deployments.plan.checkpoint import weights_of
from deployments.plan.kv_layout import KVLayout
from deployments.plan.memory_budget import GIB, DeviceMemoryError
from deployments.plan.model_shape import choose_dtype_name
from deployments.plan.replica_report import MemoryPlan
from deployments.plan.sizes import CPU_KV_FRACTION, CPU_SEQS
from deployments.plan.weight_count import count_weights
from deployments.vllm_engine.adapters import Adapter, adapter_arguments, read_adapters
from deployments.vllm_engine.logs import Cause, EngineLogs
from deployments.vllm_engine.moves import Runner
from deployments.vllm_engine.scheduler import bind

logger = logging.getLogger("ray.serve.raystream.replica")

CPU_KV_BYTES: Final = 4 * GIB
"""The most that `kv_cache_memory_bytes: auto` is on a CPU: vLLM takes all of it at its start.
Its own default is as much.
"""

FIT: Final = -1
"""To vLLM, the longest `max_model_len` that the memory holds."""

COMPILERS: Final = ("g++", "c++", "clang++")
"""What torch compiles a CPU's kernels with; CXX may name another."""

FIXED: Final[dict[str, Any]] = {
    "load_format": "safetensors",  # auto would also take pickled weights
    "trust_remote_code": False,
    "generation_config": "vllm",  # the replica applies the model's defaults
    "scheduling_policy": "priority",  # sequences that moved here run first
    "structured_outputs_config": {"backend": "guidance"},
    "max_logprobs": 20,
    "disable_log_stats": True,  # vLLM's own loggers; ours stays
    "enable_log_requests": False,
    "use_tqdm_on_load": False,  # a log would hold tatters of the bar
}
"""The arguments that no entry may change."""

SHORT_OF_MEMORY: Final = ("out of memory", "OutOfMemory", "Free memory on device")
"""How errors read that the next start may not meet."""


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """vLLM's engine, ready to run sequences.

    Attributes:
        llm: The engine.
        runner: Its model runner.
        facts: What the replica is told of it.
        adapters: The model's adapters, which it has not loaded yet.
    """

    llm: AsyncLLM
    runner: Runner
    facts: EngineFacts
    adapters: tuple[Adapter, ...]


def start_engine(
    spec: ModelSpec,
    logs: EngineLogs,
    make_stat_logger: Callable[[VllmConfig, int], StatLoggerBase],
    progress: StartProgress,
    *,
    on_cpu: bool,
) -> StartedEngine:
    """Start the engine and wait until it is ready.

    Args:
        spec: The model.
        logs: Where vLLM's processes log.
        make_stat_logger: Called once with vLLM's configuration.
        progress: Counts what is downloaded.
        on_cpu: Whether the model runs on the CPU.

    Raises:
        UnsupportedModelError: The next start would end the same; one line says why.
        DeviceMemoryError: Memory ran out.
        RuntimeError: Anything else; one line says what.
    """
    download_files(spec.source, spec.entry.revision, progress)
    progress.begin(StartPhase.LOADING)
    adapters = read_adapters(spec)
    if spec.entry.engine_args.uses_ray:
        lead_to_ray()
    with explaining(logs):
        tokenizer = load_tokenizer(spec.source, revision=spec.entry.revision)
        loras = adapter_arguments(adapters, spec.entry.engine_args, on_cpu=on_cpu)
        args = AsyncEngineArgs(**{**FIXED, **arguments(spec, on_cpu=on_cpu), **loras})
        config = args.create_engine_config()
        if on_cpu:
            check_heads(config.model_config)
        runner = bind(config)
        llm = AsyncLLM.from_vllm_config(
            config, stat_loggers=[make_stat_logger], disable_log_stats=True
        )
    with ending(llm):
        drop_metrics(llm)
        facts = _facts(spec, llm, runner, tokenizer, adapters)
    return StartedEngine(llm, runner, facts, adapters)


def lead_to_ray() -> None:
    """Have EngineCore find this replica's Ray, on which it starts the workers.

    vLLM would do so itself if it had to choose how processes are started. The terminal gets no line
    of that connection, nor the workers' warnings: errors of theirs reach EngineCore.
    """
    os.environ["RAY_ADDRESS"] = get_runtime_context().gcs_address
    os.environ |= {"RAY_LOG_TO_DRIVER": "0", "RAY_LOGGER_LEVEL": "warning"}


def drop_metrics(llm: AsyncLLM) -> None:
    """Drop vLLM's own metrics, which it keeps beside other loggers whatever its arguments say.

    Nobody reads them here. They took a third of the event loop's time at the end of a step, and
    would read what `scheduler` sends in a field of the figures that is free here.
    """
    loggers = llm.logger_manager
    assert loggers is not None, "it has ours"
    loggers.stat_loggers = [
        each for each in loggers.stat_loggers if not isinstance(each, PrometheusStatLogger)
    ]


def arguments(spec: ModelSpec, *, on_cpu: bool) -> dict[str, Any]:
    """Return vLLM's arguments for a model's entry: what it gives, and what `auto` means."""
    entry = spec.entry
    given = entry.engine_args.given
    chosen: dict[str, Any] = {
        "model": spec.source,
        "revision": entry.revision,
        "tokenizer_revision": entry.revision,
        "served_model_name": spec.id,
        "dtype": _dtype(spec, on_cpu=on_cpu),
        "max_model_len": number(entry.max_model_len) or FIT,
        "max_num_seqs": number(entry.max_num_seqs) or (CPU_SEQS if on_cpu else MAX_AUTO_SEQS),
        "enable_prefix_caching": entry.prefix_caching,
        # With one worker, the model runs in EngineCore's own process; `given` may say `ray`.
        "distributed_executor_backend": "uni" if entry.engine_args.num_workers == 1 else "mp",
    }
    step_tokens, kv_bytes = number(entry.max_batched_tokens), number(entry.kv_cache_memory_bytes)
    if step_tokens is not None:
        chosen["max_num_batched_tokens"] = step_tokens
    if on_cpu:
        kv_bytes = kv_bytes or min(int(CPU_KV_FRACTION * cgroup.total_bytes()), CPU_KV_BYTES)
        if not _has_compiler():
            logger.warning("%s is not compiled: this machine has no C++ compiler", spec.id)
            chosen["enforce_eager"] = True
    else:
        chosen["gpu_memory_utilization"] = entry.engine_args.utilization(spec.device_share)
        # Its memory then comes from an allocator of vLLM's own, which can give it back.
        chosen["enable_sleep_mode"] = number(entry.light_sleep_after_s) is not None
    if kv_bytes is not None:
        chosen["kv_cache_memory_bytes"] = kv_bytes
    return chosen | given


def check_heads(model: VllmModelConfig) -> None:
    """Refuse heads for which vLLM has no kernel on a CPU; it would end in its first step.

    On a GPU vLLM asks its kernels itself, when it starts.

    Raises:
        UnsupportedModelError: There is none.
    """
    if model.is_attention_free or model.use_mla:
        return
    sizes = AttentionBackendEnum.CPU_ATTN.get_class().get_supported_head_sizes()
    if (size := model.get_head_size()) not in sizes:
        raise UnsupportedModelError(
            f"vLLM's CPU build has no kernel for attention heads of {size} elements, only for "
            f"{', '.join(map(str, sizes))}; leave out `engine: vllm`, or run the model on a GPU"
        )


def _dtype(spec: ModelSpec, *, on_cpu: bool) -> str:
    """Return the weights' type as the entry's `dtype` says; what is quantized, vLLM decides."""
    entry = spec.entry
    if entry.dtype != "auto":
        return entry.dtype
    settings = read_settings(spec.source, revision=entry.revision)
    if settings.get("quantization_config"):
        return "auto"
    return choose_dtype_name(
        str(settings.get("dtype") or settings.get("torch_dtype") or "float32"),
        "auto",
        on_cpu=on_cpu,
        has_bf16=on_cpu and torch.cpu._is_avx512_bf16_supported(),
    )


def _has_compiler() -> bool:
    return any(map(shutil.which, filter(None, (os.environ.get("CXX"), *COMPILERS))))


@contextmanager
def explaining(logs: EngineLogs) -> Iterator[None]:
    """Raise what the block raises as `explained` tells it, with the cause that vLLM has logged."""
    try:
        yield
    except Exception as error:
        raise explained(error, logs.first_cause()) from error


@contextmanager
def ending(llm: AsyncLLM) -> Iterator[None]:
    """End an engine that has started if the block fails: nobody else knows of it yet."""
    try:
        yield
    except Exception as error:
        llm.shutdown(timeout=1)
        raise explained(error, None) from error


def explained(error: Exception, cause: Cause | None) -> Exception:
    """Return what a failed start is told as: the kind decides whether it is tried again.

    Args:
        error: What vLLM raised in this process.
        cause: What another of its processes logged: it knows why, and the error does not.
    """
    if isinstance(error, ValidationError):
        found = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
        return UnsupportedModelError(f"vLLM refuses its arguments: {found}")
    if isinstance(error, UnsupportedModelError):
        return error
    cause = cause or Cause(type(error).__name__, reason_of(error))
    reason = f"vLLM can't start: {cause.reason}"
    if any(word in f"{cause.kind} {cause.reason}" for word in SHORT_OF_MEMORY):
        return DeviceMemoryError(reason)
    is_passing = issubclass(_builtin(cause.kind), (OSError, RuntimeError, MemoryError))
    return RuntimeError(reason) if is_passing else UnsupportedModelError(reason)


def _builtin(kind: str) -> type[BaseException]:
    found = getattr(builtins, kind, RuntimeError)
    return found if isinstance(found, type) and issubclass(found, BaseException) else RuntimeError


def _facts(
    spec: ModelSpec,
    llm: AsyncLLM,
    runner: Runner,
    tokenizer: Any,
    adapters: tuple[Adapter, ...],
) -> EngineFacts:
    config = llm.vllm_config
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    limits = EngineLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=model.max_model_len,
        max_batched_tokens=scheduler.max_num_batched_tokens,
    )
    # Blocks of hybrid models differ in what they hold of a token, so vLLM counts tokens itself.
    num_kv_tokens = cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size
    layout = KVLayout(
        (model.max_model_len,), (num_kv_tokens // cache.block_size,), cache.block_size
    )
    _, weight_bytes = weights_of(spec.source, spec.entry.revision)
    kv_bytes = cache.kv_cache_memory_bytes or 0
    dtype = str(model.quantization or str(model.dtype).removeprefix("torch."))
    num_threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    return EngineFacts(
        tokenizer=tokenizer,
        processor=None,
        generation_config=_generation_config(model),
        vocab_size=model.get_vocab_size(),
        limits=limits,
        layout=layout,
        memory=MemoryPlan(
            usable_bytes=weight_bytes + kv_bytes,
            weight_bytes=weight_bytes,
            step_bytes=0,
            captured_bytes=0,
            kv_bytes=kv_bytes,
            num_kv_tokens=num_kv_tokens,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_batched_tokens=limits.max_batched_tokens,
        ),
        num_parameters=count_weights(spec.source, spec.entry.revision) or 0,
        dtype=dtype,
        num_threads=num_threads,
        summary=(
            f"vLLM {vllm.__version__}, model runner {runner}, {dtype}, "
            f"KV memory for {num_kv_tokens} tokens, {kv_bytes / GIB:.3f} GiB"
        ),
        versions={
            "engine": f"vllm {vllm.__version__}",
            "runner": str(runner),
            "arguments": repr(sorted(spec.entry.engine_args.given.items())),
            "dtype": str(model.dtype),
            "exact": str(spec.entry.exact),
            "adapters": repr([(each.id, content_digest(each.folder)) for each in adapters]),
            **package_versions(),
        },
    )


def _generation_config(model: Any) -> GenerationConfig | None:
    values = model.try_get_generation_config()
    return GenerationConfig(**values) if values else None  # type: ignore[no-untyped-call] # left untyped
