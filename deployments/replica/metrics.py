"""Records what a model's replica does, by the definitions of `telemetry.metric_table`.

Times are those of the client's request where the replica knows them: it learns from the request how
long ago that arrived.
"""

from deployments.contract.output import EngineStats, FinishReason, TextDelta
from deployments.contract.telemetry.memory_report import MemoryUse, MemoryWarning
from deployments.contract.telemetry.metric_store import Gauge, MetricStore
from deployments.contract.telemetry.metric_table import (
    ANSWER_LENGTH,
    ASLEEP,
    ASLEEP_MEMORY,
    BATCH_SEQUENCES,
    BATCH_TOKENS,
    DECODE_TIME,
    DEVICE_MEMORY_TOTAL,
    DEVICE_MEMORY_USED,
    E2E,
    FINISHED,
    GENERATION_TOKENS,
    ITL,
    KV_USAGE,
    LONGEST_WAIT,
    MAX_ANSWER_LENGTH,
    MEMORY_WARNINGS,
    PREEMPTIONS,
    PREFILL_TIME,
    PREFIX_HITS,
    PREFIX_QUERIES,
    PROMPT_LENGTH,
    PROMPT_TOKENS,
    QUEUE_TIME,
    REPLICA_MEMORY,
    RUNNING,
    SERVICE_GAP,
    SUCCESSES,
    TPOT,
    TTFT,
    WAITING,
    WAITING_FOR,
    WAKE_TIME,
)
from deployments.plan.replica_report import NO_WAITS, LightSleep, SleepState, WaitReason, Waits


class ReplicaMetrics:
    """Records what the replica of any model does."""

    def __init__(self, store: MetricStore, model_id: str) -> None:
        """Open the series.

        Args:
            store: Takes the values.
            model_id: The model, which labels every series.
        """
        store.open_series(model_id)
        self._running = store.gauge(RUNNING.name, model_id)
        self._waiting = store.gauge(WAITING.name, model_id)
        self._prompt_tokens = store.counter(PROMPT_TOKENS.name, model_id)
        self._successes = {
            reason: store.counter(SUCCESSES.name, model_id, reason.value) for reason in FINISHED
        }
        self._e2e = store.histogram(E2E.name, model_id)
        self._waits = NO_WAITS
        self._longest_wait = store.gauge(LONGEST_WAIT.name, model_id)
        self._service_gap = store.gauge(SERVICE_GAP.name, model_id)
        self._waiting_for: dict[WaitReason, Gauge] = {}
        self._asleep = store.gauge(ASLEEP.name, model_id)
        self._asleep_memory = store.gauge(ASLEEP_MEMORY.name, model_id)
        self._wake_time = store.gauge(WAKE_TIME.name, model_id)

    def observe_waits(self, waits: Waits) -> None:
        """Record why and how long requests wait; nothing new costs next to nothing."""
        if waits is self._waits:
            return
        self._waits = waits
        self._longest_wait.set(waits.longest_s)
        self._service_gap.set(waits.service_gap_tokens)
        for reason, gauge in self._waiting_for.items():
            gauge.set(waits.by_reason.get(reason, 0))

    def observe_sleep(self, report: LightSleep) -> None:
        """Record whether the replica sleeps lightly, and what that gave and cost."""
        self._asleep.set(int(report.state in (SleepState.ASLEEP, SleepState.WAKING)))
        if report.asleep_bytes is not None:
            self._asleep_memory.set(report.asleep_bytes)
        if report.last_wake_s is not None:
            self._wake_time.set(report.last_wake_s)

    def count_prompt(self, num_tokens: int) -> None:
        """Record a prompt, or a pooler's texts, that the replica has accepted."""
        self._prompt_tokens.inc(num_tokens)


class GeneratorMetrics(ReplicaMetrics):
    """Records what a text model's replica does."""

    def __init__(self, store: MetricStore, model_id: str) -> None:
        """Open the series; see `ReplicaMetrics`."""
        super().__init__(store, model_id)
        self._waiting_for = {
            reason: store.gauge(WAITING_FOR.name, model_id, reason) for reason in WaitReason
        }
        self._kv_usage = store.gauge(KV_USAGE.name, model_id)
        self._prefix_queries = store.counter(PREFIX_QUERIES.name, model_id)
        self._prefix_hits = store.counter(PREFIX_HITS.name, model_id)
        self._preemptions = store.counter(PREEMPTIONS.name, model_id)
        self._generation_tokens = store.counter(GENERATION_TOKENS.name, model_id)
        self._ttft = store.histogram(TTFT.name, model_id)
        self._itl = store.histogram(ITL.name, model_id)
        self._tpot = store.histogram(TPOT.name, model_id)
        self._queue_time = store.histogram(QUEUE_TIME.name, model_id)
        self._prefill_time = store.histogram(PREFILL_TIME.name, model_id)
        self._decode_time = store.histogram(DECODE_TIME.name, model_id)
        self._prompt_length = store.histogram(PROMPT_LENGTH.name, model_id)
        self._answer_lengths = [
            store.histogram(metric.name, model_id) for metric in (ANSWER_LENGTH, MAX_ANSWER_LENGTH)
        ]

    def observe_engine(self, stats: EngineStats) -> None:
        """Record the engine's load and its totals."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_usage)
        self._prefix_queries.raise_to(stats.num_prompt_tokens)
        self._prefix_hits.raise_to(stats.num_cached_tokens)
        self._preemptions.raise_to(stats.num_preempted)

    def observe_first_tokens(self, num_tokens: int, since_arrival_s: float | None) -> None:
        """Record a sequence's first tokens here.

        Args:
            num_tokens: At least one.
            since_arrival_s: The time since the request arrived; None if an earlier replica has
                generated the answer's first token.
        """
        self._generation_tokens.inc(num_tokens)
        if since_arrival_s is not None:
            self._ttft.observe(since_arrival_s)

    def observe_tokens(self, num_tokens: int, since_last_s: float) -> None:
        """Record further tokens of a sequence, and the time that they took together."""
        self._generation_tokens.inc(num_tokens)
        self._itl.observe(since_last_s / num_tokens, num_tokens)

    def observe_finish(
        self, reason: FinishReason, *, duration_s: float, num_prompt_tokens: int, num_tokens: int
    ) -> None:
        """Record a complete answer.

        Args:
            reason: One of `FINISHED`.
            duration_s: The time since the request arrived.
            num_prompt_tokens: Tokens of the prompt.
            num_tokens: Tokens of the answer, with those of earlier replicas.
        """
        self._successes[reason].inc()
        self._e2e.observe(duration_s)
        self._prompt_length.observe(num_prompt_tokens)
        for histogram in self._answer_lengths:
            histogram.observe(num_tokens)

    def observe_phases(
        self, *, queue_s: float, prefill_s: float, decode_s: float, num_tokens: int
    ) -> None:
        """Record the three parts of a complete answer's time."""
        self._queue_time.observe(queue_s)
        self._prefill_time.observe(prefill_s)
        self._decode_time.observe(decode_s)
        if num_tokens > 1:
            self._tpot.observe(decode_s / (num_tokens - 1))


class MemoryMetrics:
    """Records the memory of a replica and of its device; called on the monitor's thread."""

    def __init__(self, store: MetricStore, model_id: str) -> None:
        """Record into a store, under a model's name."""
        self._store = store
        self._model_id = model_id

    def observe(self, use: MemoryUse) -> None:
        """Record a sample; a figure that is not known keeps its last value."""
        for metric, value in (
            (REPLICA_MEMORY, use.process_bytes),
            (DEVICE_MEMORY_USED, use.device_used_bytes),
            (DEVICE_MEMORY_TOTAL, use.device_total_bytes),
        ):
            if value is not None:
                self._store.gauge(metric.name, self._model_id).set(value)

    def count_warning(self, warning: MemoryWarning) -> None:
        """Record a warning that begins."""
        self._store.counter(MEMORY_WARNINGS.name, self._model_id, warning.of).inc()


class StreamClock:
    """Times one sequence for the metrics."""

    def __init__(
        self,
        metrics: GeneratorMetrics,
        *,
        arrived_s: float,
        num_prompt_tokens: int,
        num_given_tokens: int = 0,
    ) -> None:
        """Start the clock.

        Args:
            metrics: The metrics that record the times.
            arrived_s: When the client's request arrived, by this process's monotonic clock.
            num_prompt_tokens: Tokens of the prompt.
            num_given_tokens: Tokens of the answer that earlier replicas have generated. Without the
                times of these, the phases of the answer are not known.
        """
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._num_prompt_tokens = num_prompt_tokens
        self._num_given_tokens = num_given_tokens
        self._num_tokens = 0
        self._begun_s: float | None = None
        self._first_s = self._last_s = arrived_s

    def observe(self, delta: TextDelta, now_s: float) -> None:
        """Record a delta.

        Args:
            delta: What the sequence has gained.
            now_s: When the engine had it ready, by this process's monotonic clock.
        """
        num_tokens = len(delta.token_ids)
        if num_tokens:
            if self._num_tokens:
                self._metrics.observe_tokens(num_tokens, now_s - self._last_s)
            else:
                self._first_s, self._begun_s = now_s, delta.begun_s
                is_first = not self._num_given_tokens
                since_s = now_s - self._arrived_s if is_first else None
                self._metrics.observe_first_tokens(num_tokens, since_s)
            self._num_tokens += num_tokens
            self._last_s = now_s
        elif delta.begun_s is not None:  # only the prompt was to be computed
            self._first_s, self._last_s, self._begun_s = now_s, now_s, delta.begun_s
        if delta.finish_reason in FINISHED:
            self._finish(delta.finish_reason, now_s)

    def _finish(self, reason: FinishReason, now_s: float) -> None:
        self._metrics.observe_finish(
            reason,
            duration_s=now_s - self._arrived_s,
            num_prompt_tokens=self._num_prompt_tokens,
            num_tokens=self._num_given_tokens + self._num_tokens,
        )
        if self._begun_s is not None and not self._num_given_tokens:
            self._metrics.observe_phases(
                queue_s=self._begun_s - self._arrived_s,
                prefill_s=self._first_s - self._begun_s,
                decode_s=self._last_s - self._first_s,
                num_tokens=self._num_tokens,
            )


class PoolerMetrics(ReplicaMetrics):
    """Records what a pooler's replica does."""

    def __init__(self, store: MetricStore, model_id: str) -> None:
        """Open the series; see `ReplicaMetrics`."""
        super().__init__(store, model_id)
        self._batch_sequences = store.histogram(BATCH_SEQUENCES.name, model_id)
        self._batch_tokens = store.histogram(BATCH_TOKENS.name, model_id)

    def observe_batch(self, *, num_sequences: int, num_tokens: int) -> None:
        """Record a micro-batch, unless it is an idle device's probe, which has no sequences."""
        if num_sequences:
            self._batch_sequences.observe(num_sequences)
            self._batch_tokens.observe(num_tokens)

    def observe_queue(self, *, num_running: int, num_waiting: int) -> None:
        """Record the replica's load."""
        self._running.set(num_running)
        self._waiting.set(num_waiting)

    def observe_finish(self, *, duration_s: float) -> None:
        """Record a complete request."""
        self._successes[FinishReason.STOP].inc()
        self._e2e.observe(duration_s)
