"""The metrics of a classifier's replica; names that generators have too mean the same.

Ray adds the tags of application, deployment and replica, and shows each name as `ray_<name>`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from ray.serve.metrics import Counter, Gauge, Histogram

from deployments.classifier.device_worker import BatchStats
from deployments.metrics import LATENCY_BUCKETS_S

SEQUENCE_BUCKETS: list[float] = [1, 2, 4, 8, 16, 32, 64, 128, 256]
TOKEN_BUCKETS: list[float] = [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]

GAUGES: Mapping[str, str] = MappingProxyType(
    {
        "num_requests_running": "Requests that the device has taken.",
        "num_requests_waiting": "Requests that wait for the device.",
    }
)
COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "request_success_total": "Requests that ended as they should.",
        "prompt_tokens_total": "Tokens of accepted texts.",
    }
)
HISTOGRAMS: Mapping[str, tuple[str, list[float]]] = MappingProxyType(
    {
        "batch_sequences": ("Texts of one micro-batch.", SEQUENCE_BUCKETS),
        "batch_tokens": ("Tokens of one micro-batch.", TOKEN_BUCKETS),
        "e2e_request_latency_seconds": ("From arrival to the answer.", LATENCY_BUCKETS_S),
    }
)


class ClassifierMetrics:
    """Records what a replica does."""

    def __init__(self) -> None:
        """Register every metric of the tables above."""
        self._gauges = {name: Gauge(name, description=text) for name, text in GAUGES.items()}
        self._counters = {name: Counter(name, description=text) for name, text in COUNTERS.items()}
        self._histograms = {
            name: Histogram(name, description=text, boundaries=buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }

    def observe_batch(self, stats: BatchStats) -> None:
        """Record a micro-batch; what an idle device runs for a probe is none."""
        if stats.num_sequences:
            self._histograms["batch_sequences"].observe(stats.num_sequences)
            self._histograms["batch_tokens"].observe(stats.num_tokens)

    def observe_line(self, *, num_running: int, num_waiting: int) -> None:
        """Record how busy the replica is."""
        self._gauges["num_requests_running"].set(num_running)
        self._gauges["num_requests_waiting"].set(num_waiting)

    def count_texts(self, num_tokens: int) -> None:
        """Record the tokens of an accepted request."""
        self._counters["prompt_tokens_total"].inc(num_tokens)

    def observe_finish(self, *, duration_s: float) -> None:
        """Record a request that ended as it should."""
        self._counters["request_success_total"].inc()
        self._histograms["e2e_request_latency_seconds"].observe(duration_s)
