"""Starts vLLM's pooling runner for a model's entry, and computes texts with it.

It runs in vLLM's environment; `pooled_model` says what vLLM is told of the model's files.
"""

import os
from itertools import count
from typing import Any

import torch
import vllm
from vllm import PoolingParams
from vllm.config import PoolerConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.compute.hub_files import download_files
from deployments.contract.model_spec import MAX_AUTO_SEQS, ModelSpec, number
from deployments.contract.telemetry.start_progress import StartPhase, StartProgress
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.plan.checkpoint import weights_of
from deployments.plan.memory_budget import GIB, POOLER_STEP_TOKENS
from deployments.plan.replica_report import MemoryPlan
from deployments.plan.weight_count import count_weights
from deployments.pooling.embedder import Embedder
from deployments.pooling.model_outline import label_names
from deployments.pooling.pooling_worker import PoolerFacts
from deployments.pooling.request_queue import TokenIds
from deployments.vllm_engine.logs import EngineLogs
from deployments.vllm_engine.pooled_model import PooledModel, check_layers, read_model
from deployments.vllm_engine.pooling_worker import EngineLostError
from deployments.vllm_engine.scheduler import PoolingScheduler
from deployments.vllm_engine.start import FIXED, arguments, check_heads, ending, explaining
from deployments.vllm_engine.step_figures import StepLogger
from deployments.vllm_engine.watches import Watch


class VllmPooling:
    """A model on vLLM's pooling runner; see `PooledEngine`.

    Attributes:
        facts: What the replica is told of the model.
    """

    def __init__(self, llm: AsyncLLM, model: PooledModel, facts: PoolerFacts, watch: Watch) -> None:
        """Wrap vLLM's front end.

        Args:
            llm: Made outside any event loop; it stays with the first that asks it.
            model: The model's files.
            facts: What the replica is told.
            watch: Is told of each step.
        """
        self.facts = facts
        self._llm = llm
        self._model = model
        self._watch = watch
        self._serial = count()

    @property
    def max_batched_tokens(self) -> int:
        """The most tokens of a step."""
        return self.facts.memory.max_batched_tokens

    @property
    def probe(self) -> TokenIds:
        """A short text that the model accepts."""
        return self._model.probe

    @property
    def is_lost(self) -> bool:
        """Whether vLLM's processes have ended."""
        return bool(self._llm.errored)

    async def check_task(self) -> None:
        """Raise unless the model does its task; see `PooledEngine`."""
        task, tasks = self._model.task, await self._llm.get_supported_tasks()
        if task not in tasks:
            raise UnsupportedModelError(
                f"vLLM can't {task} with this model; it can {', '.join(tasks)}"
            )

    async def compute(self, token_ids: TokenIds, type_ids: TokenIds | None) -> torch.Tensor:
        """Return the row that answers a text; see `PooledEngine`."""
        # The numbers before the activation: `PooledModel` has the same as the embedded engine.
        params = PoolingParams(
            task=self._model.task, use_activation=False, extra_kwargs=_types(type_ids)
        )
        outputs = self._llm.encode(
            tokens_input(list(token_ids)), params, f"text-{next(self._serial)}"
        )
        try:
            async for output in outputs:
                numbers: torch.Tensor = output.outputs.data
        except EngineDeadError as error:
            raise EngineLostError from error
        return self._model.finish(numbers.float())

    def note_begin(self) -> None:
        """Note that there was nothing to do until now."""
        self._watch.note_begin()

    def is_hung(self) -> bool:
        """Return whether vLLM, which has work, can only hang."""
        return self._watch.is_hung()

    def shutdown(self) -> None:
        """End vLLM's processes, whatever they do."""
        self._llm.shutdown(timeout=1)


def open_pooling(
    spec: ModelSpec, logs: EngineLogs, progress: StartProgress, *, on_cpu: bool
) -> VllmPooling:
    """Start vLLM for a model that classifies or embeds.

    Args:
        spec: The model.
        logs: Where vLLM's processes log.
        progress: Counts what is downloaded.
        on_cpu: Whether the model runs on the CPU.

    Raises:
        UnsupportedModelError: The next start would end the same; one line says why.
        DeviceMemoryError: Memory ran out.
        RuntimeError: Anything else; one line says what.
    """
    download_files(spec.source, spec.entry.revision, progress)
    progress.begin(StartPhase.LOADING)
    model = read_model(spec)
    watch = Watch(on_cpu=on_cpu)
    with explaining(logs):
        args = {**FIXED, **arguments(spec, on_cpu=on_cpu), **_pooling_arguments(spec, model)}
        config = AsyncEngineArgs(**args).create_engine_config()
        config.scheduler_config.scheduler_cls = (
            f"{PoolingScheduler.__module__}.{PoolingScheduler.__qualname__}"
        )
        if on_cpu:
            check_heads(config.model_config)
        check_layers(spec.source, model.model, config.model_config)
        llm = AsyncLLM.from_vllm_config(
            config,
            stat_loggers=[lambda *_: StepLogger(lambda *_: watch.note_progress())],
            disable_log_stats=True,
        )
    with ending(llm):
        facts = _facts(spec, config, model)
    return VllmPooling(llm, model, facts, watch)


def _pooling_arguments(spec: ModelSpec, model: PooledModel) -> dict[str, Any]:
    """Return vLLM's arguments that are others for texts than for sequences."""
    step_tokens = number(spec.entry.max_batched_tokens) or POOLER_STEP_TOKENS
    # A text runs in one step, as with most models that are no decoders.
    step_tokens = max(step_tokens, model.max_model_len)
    return {
        "runner": "pooling",
        "pooler_config": PoolerConfig(**model.pooler_config),
        "skip_tokenizer_init": True,
        "max_model_len": model.max_model_len,
        "max_num_seqs": min(MAX_AUTO_SEQS, step_tokens),
        "max_num_batched_tokens": step_tokens,
        # A client could tell from the time whether another's text began like its own.
        "enable_prefix_caching": False,
    }


def _types(type_ids: TokenIds | None) -> dict[str, int] | None:
    """Return the types of a pair's tokens as vLLM takes them: where the second text begins.

    Raises:
        ValueError: They are others than zeros and then ones.
    """
    if type_ids is None:
        return None
    begin = type_ids.index(1) if 1 in type_ids else len(type_ids)
    if type_ids != (0,) * begin + (1,) * (len(type_ids) - begin):
        raise ValueError("the types of tokens are not zeros and then ones")
    return {"compressed_token_type_ids": begin}


def _facts(spec: ModelSpec, config: VllmConfig, model: PooledModel) -> PoolerFacts:
    sizes, scheduler = config.model_config, config.scheduler_config
    _, weight_bytes = weights_of(spec.source, spec.entry.revision)
    dtype = str(sizes.quantization or str(sizes.dtype).removeprefix("torch."))
    outline = model.model
    outputs = (
        f"vectors of {outline.width} numbers"
        if isinstance(outline, Embedder)
        else f"{len(label_names(outline.config))} labels"
    )
    return PoolerFacts(
        model=outline,
        tokenizer=model.tokenizer,
        max_model_len=sizes.max_model_len,
        reads_types=model.reads_types,
        memory=MemoryPlan(
            usable_bytes=weight_bytes,
            weight_bytes=weight_bytes,
            step_bytes=0,
            captured_bytes=0,
            kv_bytes=0,
            num_kv_tokens=0,
            max_model_len=sizes.max_model_len,
            max_num_seqs=1,
            max_batched_tokens=scheduler.max_num_batched_tokens,
        ),
        num_parameters=count_weights(spec.source, spec.entry.revision) or 0,
        dtype=dtype,
        num_threads=int(os.environ.get("OMP_NUM_THREADS", "1")),
        summary=(
            f"vLLM {vllm.__version__}, {dtype}, {weight_bytes / GIB:.3f} GiB of weights, "
            f"{outputs}, texts of {sizes.max_model_len} tokens"
        ),
    )
