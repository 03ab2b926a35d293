"""What vLLM tells of each step, and the counters that follow from it."""

from collections.abc import Callable

from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from deployments.contract.output import EngineStats


class StepCounts:
    """The engine's counters, of which vLLM tells the changes of each step.

    Attributes:
        num_resumed: Sequences that came from another replica; the engine counts them.
    """

    def __init__(self) -> None:
        """Start at zero."""
        self.num_resumed = 0
        self._last = SchedulerStats()
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_preempted = 0

    def note(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        """Count a step."""
        if scheduler is not None:
            self._last = scheduler
            self._num_steps += 1
            self._num_prompt_tokens += scheduler.prefix_cache_stats.queries
            self._num_cached_tokens += scheduler.prefix_cache_stats.hits
        if iteration is not None:
            self._num_preempted += iteration.num_preempted_reqs

    @property
    def stats(self) -> EngineStats:
        """The load after the last step, and the counters."""
        last = self._last
        return EngineStats(
            last.num_running_reqs,
            last.num_waiting_reqs + last.num_skipped_waiting_reqs,
            self._num_steps,
            self._num_prompt_tokens,
            self._num_cached_tokens,
            last.kv_cache_usage,
            self._num_preempted,
            self.num_resumed,
        )


class StepLogger(StatLoggerBase):
    """Passes each step's figures on; vLLM calls it at the end of the step."""

    def __init__(
        self, note: Callable[[SchedulerStats | None, IterationStats | None], None]
    ) -> None:
        """Start.

        Args:
            note: Called with each step's figures.
        """
        self._note = note

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Pass a step's figures on."""
        self._note(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Log nothing: the replica does."""
