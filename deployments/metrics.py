"""The metrics of a model replica, under the names that dashboards for such servers know.

Ray adds the tags of application, deployment and replica, and exports each name as `ray_<name>`. If
generators and classifiers have a metric of the same name, it means the same in both, with the same
kind and buckets: Ray merges them into one.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ray.serve.metrics import Counter, Gauge, Histogram

from deployments.engine.output import EngineStats, FinishReason, TextDelta

LATENCY_BUCKETS_S = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120]
TOKEN_BUCKETS_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5]
SEQUENCE_BUCKETS: list[float] = [1, 2, 4, 8, 16, 32, 64, 128, 256]
TOKEN_BUCKETS: list[float] = [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
OBSERVATION_S = 0.1
"""The least time between two records of a stream's tokens, except the first and the last."""


@dataclass(frozen=True, slots=True)
class MetricTable:
    """The metrics of one kind of replica, by name.

    Attributes:
        gauges: The description of each gauge.
        counters: The description of each counter.
        histograms: The description and the buckets of each histogram.
        tags: The tag of a counter, if it has one.
    """

    gauges: Mapping[str, str]
    counters: Mapping[str, str]
    histograms: Mapping[str, tuple[str, list[float]]]
    tags: Mapping[str, tuple[str]] = field(default_factory=lambda: MappingProxyType({}))


GENERATOR = MetricTable(
    gauges=MappingProxyType(
        {
            "num_requests_running": "Sequences that run.",
            "num_requests_waiting": "Sequences that wait for their turn.",
            "kv_cache_usage_perc": "KV memory that running sequences hold, from 0 to 1.",
        }
    ),
    counters=MappingProxyType(
        {
            "prompt_tokens_total": "Tokens of accepted prompts.",
            "generation_tokens_total": "Tokens generated.",
            "prefix_cache_queries_total": "Prompt tokens that were looked up in the KV memory.",
            "prefix_cache_hits_total": "Prompt tokens found there and not computed again.",
            "request_success_total": "Requests that ended without an error.",
        }
    ),
    histograms=MappingProxyType(
        {
            "time_to_first_token_seconds": ("From arrival to the first text.", LATENCY_BUCKETS_S),
            "inter_token_latency_seconds": ("Between deltas, per token.", TOKEN_BUCKETS_S),
            "e2e_request_latency_seconds": ("From arrival to the last token.", LATENCY_BUCKETS_S),
        }
    ),
    tags=MappingProxyType({"request_success_total": ("finished_reason",)}),
)

CLASSIFIER = MetricTable(
    gauges=MappingProxyType(
        {
            "num_requests_running": "Requests that the device has taken.",
            "num_requests_waiting": "Requests that wait for the device.",
        }
    ),
    counters=MappingProxyType(
        {
            "request_success_total": "Requests that ended without an error.",
            "prompt_tokens_total": "Tokens of accepted texts.",
        }
    ),
    histograms=MappingProxyType(
        {
            "batch_sequences": ("Texts in a micro-batch.", SEQUENCE_BUCKETS),
            "batch_tokens": ("Tokens in a micro-batch.", TOKEN_BUCKETS),
            "e2e_request_latency_seconds": ("From arrival to the answer.", LATENCY_BUCKETS_S),
        }
    ),
)


class _Registered:
    """The metrics of a table, registered with Ray."""

    def __init__(self, table: MetricTable) -> None:
        self.gauges = {name: Gauge(name, description=text) for name, text in table.gauges.items()}
        self.counters = {
            name: Counter(name, description=text, tag_keys=table.tags.get(name))
            for name, text in table.counters.items()
        }
        self.histograms = {
            name: Histogram(name, description=text, boundaries=buckets)
            for name, (text, buckets) in table.histograms.items()
        }


class GeneratorMetrics:
    """Records what a text model's replica does."""

    def __init__(self) -> None:
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._stats: EngineStats | None = None
        self._metrics = _Registered(GENERATOR)

    def observe_engine(self, stats: EngineStats) -> None:
        """Record the engine's load, if it has changed."""
        stats = replace(stats, num_steps=0)
        if stats == self._stats:
            return
        self._stats = stats
        self._metrics.gauges["num_requests_running"].set(stats.num_running)
        self._metrics.gauges["num_requests_waiting"].set(stats.num_waiting)
        self._metrics.gauges["kv_cache_usage_perc"].set(stats.kv_usage)
        # The engine reports totals since its start; a counter takes the increase.
        num_queried = stats.num_prompt_tokens - self._num_prompt_tokens
        num_found = stats.num_cached_tokens - self._num_cached_tokens
        self._num_prompt_tokens, self._num_cached_tokens = (
            stats.num_prompt_tokens,
            stats.num_cached_tokens,
        )
        if num_queried:
            self._metrics.counters["prefix_cache_queries_total"].inc(num_queried)
        if num_found:
            self._metrics.counters["prefix_cache_hits_total"].inc(num_found)

    def count_prompt(self, num_tokens: int) -> None:
        """Record an accepted prompt."""
        self._metrics.counters["prompt_tokens_total"].inc(num_tokens)

    def observe_tokens(self, num_tokens: int, *, since_last_s: float, is_first: bool) -> None:
        """Record new tokens and the time that they took; for the first ones that is the TTFT."""
        self._metrics.counters["generation_tokens_total"].inc(num_tokens)
        if is_first:
            self._metrics.histograms["time_to_first_token_seconds"].observe(since_last_s)
        else:
            self._metrics.histograms["inter_token_latency_seconds"].observe(
                since_last_s / num_tokens
            )

    def observe_finish(self, reason: FinishReason, *, duration_s: float) -> None:
        """Record a request that ended without an error."""
        self._metrics.counters["request_success_total"].inc(tags={"finished_reason": reason.value})
        self._metrics.histograms["e2e_request_latency_seconds"].observe(duration_s)


class StreamClock:
    """Times one stream for the metrics.

    It records the first tokens and the last at once, and those between at most every
    `OBSERVATION_S`: recording takes longer than generating a small model's token.
    """

    def __init__(self, metrics: GeneratorMetrics, arrived: float) -> None:
        """Start the clock.

        Args:
            metrics: The metrics that record the times.
            arrived: When the request arrived, in seconds of the monotonic clock.
        """
        self._metrics = metrics
        self._arrived = self._last = arrived
        self._num_tokens = 0
        self._has_tokens = False

    def observe(self, delta: TextDelta) -> None:
        """Record a delta that has become ready."""
        self._num_tokens += len(delta.token_ids)
        now, reason = time.monotonic(), delta.finish_reason
        is_due = reason is not None or not self._has_tokens or now - self._last >= OBSERVATION_S
        if self._num_tokens and is_due:
            self._metrics.observe_tokens(
                self._num_tokens, since_last_s=now - self._last, is_first=not self._has_tokens
            )
            self._has_tokens, self._last, self._num_tokens = True, now, 0
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._metrics.observe_finish(reason, duration_s=now - self._arrived)


class ClassifierMetrics:
    """Records what a classifier's replica does."""

    def __init__(self) -> None:
        self._metrics = _Registered(CLASSIFIER)

    def observe_batch(self, *, num_sequences: int, num_tokens: int) -> None:
        """Record a micro-batch, unless it is an idle device's probe, which has no sequences."""
        if num_sequences:
            self._metrics.histograms["batch_sequences"].observe(num_sequences)
            self._metrics.histograms["batch_tokens"].observe(num_tokens)

    def observe_queue(self, *, num_running: int, num_waiting: int) -> None:
        """Record the replica's load."""
        self._metrics.gauges["num_requests_running"].set(num_running)
        self._metrics.gauges["num_requests_waiting"].set(num_waiting)

    def count_texts(self, num_tokens: int) -> None:
        """Record the tokens of an accepted request."""
        self._metrics.counters["prompt_tokens_total"].inc(num_tokens)

    def observe_finish(self, *, duration_s: float) -> None:
        """Record a request that ended without an error."""
        self._metrics.counters["request_success_total"].inc()
        self._metrics.histograms["e2e_request_latency_seconds"].observe(duration_s)
