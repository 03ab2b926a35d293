"""Schedulers of vLLM that take moved sequences, and end those that failed.

A subclass of vLLM's own scheduler is the one place in EngineCore's process where code of ours is
called by name. It sets the backend of the grammars, starts the watch of the replica, and:

- fails a request whose logits held NaN, or whose draw raised: on V1 `draws` says so, on V2 vLLM
  counts NaN itself. It ends with finish reason `error` and stop reason `UNUSABLE_LOGITS`, without
  the step's token; other requests go on;
- ends a request where its grammar does, not one token later, and one whose grammar fails;
- says with each step which requests have begun: vLLM says so with a request's first token, and a
  long prompt takes several steps before that;
- on V2, appends a moved request's delivered tokens to its output before it is queued. To all of
  vLLM it then is a request that was preempted, and V2 sends its prompt and output to the worker as
  `prefill_token_ids`, with the prompt's length. V1's worker takes a new request's prompt only.

V1 runs in the project's tests. V2 needs a GPU with Triton and has not run: the tests let its
scheduler schedule on a CPU, and hold the interfaces of its worker that this relies on.

Source: vllm/v1/core/sched/scheduler.py and async_scheduler.py of vLLM 0.32. vLLM calls the
scheduler's interface not public: run the tests with each new version.
"""

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from deployments.vllm_engine.draws import Draws
from deployments.vllm_engine.failures import UNUSABLE_LOGITS, FailureRecord
from deployments.vllm_engine.grammars import Grammar, GrammarBackend
from deployments.vllm_engine.moves import KEY, Runner
from deployments.vllm_engine.watches import end_with_parent

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

logger = logging.getLogger(__name__)

BEGUN: Final = "begun"


class _ReplicaScheduler:
    """What all schedulers of ours do; a mixin before one of vLLM's."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        structured_output_manager: "StructuredOutputManager",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(  # type: ignore[call-arg] # vLLM's scheduler comes next
            vllm_config, kv_cache_config, structured_output_manager, *args, **kwargs
        )
        end_with_parent()
        # The manager would make one of vLLM's with the first request that has a grammar.
        structured_output_manager.backend = GrammarBackend(
            vllm_config,
            tokenizer=structured_output_manager.tokenizer,
            vocab_size=vllm_config.model_config.get_vocab_size(),
        )
        self._record = FailureRecord()
        self._failed: set[str] = set()
        self._begun: dict[str, int] = {}  # those that `make_stats` has not told yet

    def schedule(self, *args: Any, **kwargs: Any) -> "SchedulerOutput":
        """Schedule a step, and note the requests that begin in it."""
        scheduled: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        for each in scheduled.scheduled_new_reqs:
            self._begun[each.req_id] = each.num_computed_tokens
        return scheduled

    def make_stats(self, *args: Any, **kwargs: Any) -> "SchedulerStats | None":
        """Make a step's figures, with the requests that have begun; see `begun_in`."""
        stats: SchedulerStats | None = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        begun, self._begun = self._begun, {}
        if stats is not None and begun:
            # vLLM passes this dictionary on as it is. No engine here has a KV connector.
            stats.kv_connector_stats = {BEGUN: begun}
        return stats

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> "dict[int, EngineCoreOutputs]":
        """Take a step's tokens, and end the requests that failed in it."""
        num_nans = model_runner_output.num_nans_in_logits or {}
        self._failed = self._record.take() | {name for name, num in num_nans.items() if num}
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        return outputs

    def _update_request_with_output(
        self, request: "Request", new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        if request.request_id in self._failed:
            logger.warning("%s fails: its logits can't be used", request.request_id)
            request.status = RequestStatus.FINISHED_ERROR
            request.stop_reason = UNUSABLE_LOGITS
            return [], True
        taken, is_stopped = super()._update_request_with_output(  # type: ignore[misc]
            request, new_token_ids, is_stale
        )
        grammar = _grammar(request)
        if grammar is None or request.status == RequestStatus.FINISHED_STOPPED:
            return taken, is_stopped
        has_ended = grammar.ends_with(taken)
        if grammar.has_failed:
            request.status = RequestStatus.FINISHED_ERROR
            return [], True
        if has_ended:
            request.status = RequestStatus.FINISHED_STOPPED
        return taken, is_stopped or has_ended

    def shutdown(self) -> None:
        """End the scheduler."""
        super().shutdown()  # type: ignore[misc]
        self._record.close()


class V1Scheduler(_ReplicaScheduler, Scheduler):
    """For model runner V1, whose tokens `Draws` chooses."""

    def add_request(self, request: "Request") -> None:
        """Queue a request, and tell its row in `Draws` how to report a failure."""
        ours = _ours(request)
        if ours is not None:
            ours |= {"request_id": request.request_id, "failures": self._record.path}
        super().add_request(request)


class _MovingScheduler(_ReplicaScheduler):
    def add_request(self, request: "Request") -> None:
        """Queue a request, with the tokens that were delivered before it moved as its output."""
        ours = _ours(request)
        if ours is not None:
            request.append_output_token_ids(ours["delivered"])
            # Else a cached prefix that is longer than the prompt would fail an assertion.
            request.num_preemptions = 1
        super().add_request(request)  # type: ignore[misc]


class V2Scheduler(_MovingScheduler, Scheduler):
    """For model runner V2 without asynchronous scheduling."""


class V2AsyncScheduler(_MovingScheduler, AsyncScheduler):
    """For model runner V2 with asynchronous scheduling, vLLM's default on GPUs."""


class PoolingScheduler(Scheduler):
    """For models that classify or embed: ends EngineCore with its replica, and nothing else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        end_with_parent()


def begun_in(stats: "SchedulerStats") -> Mapping[str, int]:
    """Return the tokens that each request that has begun found in the KV memory, by vLLM's name.

    On V2 a request that was preempted begins once more, with its own tokens.

    Args:
        stats: A step's figures, in the replica.
    """
    begun: Mapping[str, int] = (stats.kv_connector_stats or {}).get(BEGUN, {})
    return begun


def bind(vllm_config: "VllmConfig") -> Runner:
    """Have an engine run our code, and return its model runner.

    Call it after `AsyncEngineArgs.create_engine_config()` and before `AsyncLLM.from_vllm_config()`:
    only a whole configuration says which runner it takes.

    Raises:
        ValueError: V1 with asynchronous scheduling, where the last token is not known when the next
            one is chosen; or V1 with VLLM_BATCH_INVARIANT, whose kernels are written in Triton: the
            engine would end in its first step.
    """
    runner = runner_of(vllm_config)
    if runner is Runner.V1 and os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        raise ValueError(
            "exact needs a GPU: vLLM has no batch-invariant kernels for a CPU; leave exact out"
        )
    chosen = scheduler_class(runner, bool(vllm_config.scheduler_config.async_scheduling))
    vllm_config.scheduler_config.scheduler_cls = f"{chosen.__module__}.{chosen.__qualname__}"
    if runner is Runner.V1:
        # V2 refuses processors of V1's kind, and needs none.
        vllm_config.model_config.logits_processors = [f"{Draws.__module__}:{Draws.__qualname__}"]
    else:
        os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = "1"  # EngineCore and its workers inherit it
    return runner


def runner_of(vllm_config: "VllmConfig") -> Runner:
    """Return the model runner that vLLM will take."""
    return Runner.V2 if vllm_config.use_v2_model_runner else Runner.V1


def scheduler_class(runner: Runner, async_scheduling: bool) -> type[Scheduler]:
    """Return the scheduler for a runner.

    Raises:
        ValueError: See `bind`.
    """
    if runner is Runner.V2:
        return V2AsyncScheduler if async_scheduling else V2Scheduler
    if async_scheduling:
        raise ValueError(
            "vLLM's model runner V1 can't schedule asynchronously here: its draws need the last "
            "token; unset VLLM_USE_V2_MODEL_RUNNER, or, if vLLM has no runner V2 for this model, "
            "serve it with raystream's own engine"
        )
    return V1Scheduler


def _ours(request: "Request") -> dict[str, Any] | None:
    """Return what `extra_args` hold of ours; the worker gets the same dictionary."""
    params = request.sampling_params
    ours: dict[str, Any] | None = ((params and params.extra_args) or {}).get(KEY)
    return ours


def _grammar(request: "Request") -> Grammar | None:
    bound = request.structured_output_request
    grammar: Grammar | None = None if bound is None else bound.grammar
    return grammar
