"""The metrics of a model replica, under the names that dashboards for such servers know.

Ray adds the tags of application, deployment and replica, and shows each name as `ray_<name>`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ray.serve.metrics import Counter, Gauge, Histogram

from deployments.engine.engine_stats import EngineStats
from deployments.engine.output import FinishReason, TextDelta

LATENCY_BUCKETS_S = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120]
TOKEN_BUCKETS_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5]

GAUGES: Mapping[str, str] = MappingProxyType(
    {
        "num_requests_running": "Sequences that hold a KV slot.",
        "num_requests_waiting": "Sequences that wait for a KV slot.",
        "kv_cache_usage_perc": "KV slots in use, from 0 to 1.",
    }
)
COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "prompt_tokens_total": "Tokens of accepted prompts.",
        "generation_tokens_total": "Tokens generated.",
        "prefix_cache_queries_total": "Prompt tokens that were looked for in the KV slots.",
        "prefix_cache_hits_total": "Prompt tokens that were found there and not computed again.",
    }
)
HISTOGRAMS: Mapping[str, tuple[str, list[float]]] = MappingProxyType(
    {
        "time_to_first_token_seconds": ("From arrival to the first text.", LATENCY_BUCKETS_S),
        "inter_token_latency_seconds": ("Between deltas, for each token.", TOKEN_BUCKETS_S),
        "e2e_request_latency_seconds": ("From arrival to the last token.", LATENCY_BUCKETS_S),
    }
)


class ReplicaMetrics:
    """Records what a replica does."""

    def __init__(self, num_slots: int) -> None:
        """Register every metric of the tables above."""
        self._num_slots = num_slots
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._stats: EngineStats | None = None
        self._gauges = {name: Gauge(name, description=text) for name, text in GAUGES.items()}
        self._counters = {name: Counter(name, description=text) for name, text in COUNTERS.items()}
        self._histograms = {
            name: Histogram(name, description=text, boundaries=buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._successes = Counter(
            "request_success_total",
            description="Requests that ended as they should.",
            tag_keys=("finished_reason",),
        )

    def observe_engine(self, stats: EngineStats) -> None:
        """Record how busy the engine is, where that has changed."""
        stats = replace(stats, num_steps=0)
        if stats == self._stats:
            return
        self._stats = stats
        self._gauges["num_requests_running"].set(stats.num_running)
        self._gauges["num_requests_waiting"].set(stats.num_waiting)
        self._gauges["kv_cache_usage_perc"].set(stats.num_running / self._num_slots)
        # The engine counts from its start; a counter takes what came since the last look.
        num_queried = stats.num_prompt_tokens - self._num_prompt_tokens
        num_found = stats.num_cached_tokens - self._num_cached_tokens
        self._num_prompt_tokens, self._num_cached_tokens = (
            stats.num_prompt_tokens,
            stats.num_cached_tokens,
        )
        if num_queried:
            self._counters["prefix_cache_queries_total"].inc(num_queried)
        if num_found:
            self._counters["prefix_cache_hits_total"].inc(num_found)

    def count_prompt(self, num_tokens: int) -> None:
        """Record an accepted prompt."""
        self._counters["prompt_tokens_total"].inc(num_tokens)

    def observe_tokens(self, num_tokens: int, *, since_last_s: float, is_first: bool) -> None:
        """Record new tokens, and how long they took; for the first ones that is the TTFT."""
        self._counters["generation_tokens_total"].inc(num_tokens)
        if is_first:
            self._histograms["time_to_first_token_seconds"].observe(since_last_s)
        else:
            self._histograms["inter_token_latency_seconds"].observe(since_last_s / num_tokens)

    def observe_finish(self, reason: FinishReason, *, duration_s: float) -> None:
        """Record a request that ended as it should."""
        self._successes.inc(tags={"finished_reason": reason.value})
        self._histograms["e2e_request_latency_seconds"].observe(duration_s)


class StreamClock:
    """Times one stream for the metrics."""

    def __init__(self, metrics: ReplicaMetrics, arrived: float) -> None:
        """Start at the request's arrival, in seconds of the monotonic clock."""
        self._metrics = metrics
        self._arrived = self._last = arrived
        self._has_tokens = False

    def observe(self, deltas: Sequence[TextDelta]) -> None:
        """Record deltas that became ready together."""
        now = time.monotonic()
        num_tokens = sum(len(delta.token_ids) for delta in deltas)
        if num_tokens:
            self._metrics.observe_tokens(
                num_tokens, since_last_s=now - self._last, is_first=not self._has_tokens
            )
            self._has_tokens, self._last = True, now
        reason = deltas[-1].finish_reason
        if reason is not None:
            self._metrics.observe_finish(reason, duration_s=now - self._arrived)
