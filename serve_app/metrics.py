"""The metrics of an ingress: counts that no replica of a model can keep.

A refused request is counted only here, where its client is answered, because it may have been
offered to several replicas, or to none. Tokens are counted here, too, where they leave: what a dead
replica had generated and not delivered does not count, nor a whole answer that fails before it is
sent, and a moved stream's prompt counts once.

The label `key` is the tenant: the name of the API key, or of a trusted gateway's tenant; see
`Standing`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from deployments.contract.errors import OverloadReason
from deployments.contract.telemetry.metric_store import Counter, Kind, Metric, MetricStore
from deployments.contract.telemetry.metric_table import GENERATOR, LATENCY_BUCKETS_S, POOLER
from serve_app.http.request_record import MoveReason, RequestRecord

REJECTIONS: Final = Metric(
    "vllm_admission_rejections_total",
    Kind.COUNTER,
    "Requests for which there was no room, by the limit that was reached.",
    ("model_name", "reason"),
    values=tuple(OverloadReason),
)
MOVES: Final = Metric(
    "raystream_streams_moved_total",
    Kind.COUNTER,
    "Streams, and other requests, that another replica has taken over.",
    ("model_name", "reason"),
    values=tuple(MoveReason),
)
PROMPT_TOKENS: Final = Metric(
    "raystream_prompt_tokens_total",
    Kind.COUNTER,
    "Tokens of prompts, once for each request, whatever the number of its answers and replicas.",
    ("model_name", "key"),
)
DELIVERED_TOKENS: Final = Metric(
    "raystream_delivered_tokens_total",
    Kind.COUNTER,
    "Tokens of answers, once handed to the HTTP server; the sum of what clients read in `usage`.",
    ("model_name", "key"),
)
PARKED: Final = Metric(
    "raystream_streams_parked",
    Kind.GAUGE,
    "Streams that have begun, hold no memory of a replica, and wait at the ingress to go on.",
)
PARKED_TIME: Final = Metric(
    "raystream_parked_seconds",
    Kind.HISTOGRAM,
    "From the moment when a stream is parked until it goes on, or ends.",
    buckets=LATENCY_BUCKETS_S,
)
BATCH_LINES: Final = Metric(
    "raystream_batch_lines_total",
    Kind.COUNTER,
    "Requests of batches that got their result: an answer, or an error.",
    ("result",),
)
RUNNING_BATCHES: Final = Metric(
    "raystream_batches_running",
    Kind.GAUGE,
    "Batches that this ingress runs; only where batches are kept.",
    (),
)

INGRESS: Final = (
    REJECTIONS,
    MOVES,
    PROMPT_TOKENS,
    DELIVERED_TOKENS,
    PARKED,
    PARKED_TIME,
    BATCH_LINES,
    RUNNING_BATCHES,
)
"""The metrics of an ingress."""

MAX_GATEWAY_TENANTS: Final = 64
"""Tenants of a gateway that an ingress counts by name, the first that ask; the rest are OTHERS.
Each name is a series of its own for each model."""

OTHERS: Final = "other gateway tenants"
"""The label of all further tenants of a gateway; no key and no single tenant has this name."""

ALL: Final = {metric.name: metric for metric in (*GENERATOR, *POOLER, *INGRESS)}
"""The definition of every metric, by its name."""


class IngressMetrics:
    """Records what an ingress does; counts what the records of requests gain.

    Attributes:
        store: Holds the values.
    """

    def __init__(
        self, model_ids: Iterable[str] = (), deployment: str = "", replica: str = ""
    ) -> None:
        """Open the series of all models.

        Args:
            model_ids: The models.
            deployment: The ingress's deployment in Ray Serve.
            replica: Serve's id of the ingress's replica.
        """
        self.store = MetricStore(INGRESS, deployment, replica)
        self._tenants: set[str] = set()  # those of a gateway that have a series
        for model_id in model_ids:
            self.store.open_series(model_id)
            self.store.gauge(PARKED.name, model_id)

    def count_line(self, *, is_error: bool) -> None:
        """Count a batch's line; see `batch_run.Meter`."""
        self.store.counter(BATCH_LINES.name, "error" if is_error else "answer").inc()

    def running_batches(self, number: int) -> None:
        """Note how many batches run; see `batch_run.Meter`."""
        self.store.gauge(RUNNING_BATCHES.name).set(number)

    def count_prompt(self, record: RequestRecord, num_tokens: int) -> None:
        """Count a prompt; see `Meter`."""
        self._of(PROMPT_TOKENS, record).inc(num_tokens)

    def delivered_tokens(self, record: RequestRecord) -> Counter:
        """Return the counter of an answer's tokens; see `Meter`."""
        return self._of(DELIVERED_TOKENS, record)

    def count_move(self, record: RequestRecord, reason: MoveReason) -> None:
        """Count a move; see `Meter`."""
        self.store.counter(MOVES.name, record.model or "", reason).inc()

    def count_refusal(self, record: RequestRecord, reason: OverloadReason) -> None:
        """Count a refused request; see `Meter`."""
        self.store.counter(REJECTIONS.name, record.model or "", reason).inc()

    @contextmanager
    def parked(self, record: RequestRecord) -> Iterator[None]:
        """Count a stream as parked while the block runs, and how long that was; see `Meter`."""
        gauge = self.store.gauge(PARKED.name, record.model or "")
        parked_s = record.now()
        gauge.set(gauge.value + 1)
        try:
            yield
        finally:
            gauge.set(gauge.value - 1)
            time = self.store.histogram(PARKED_TIME.name, record.model or "")
            time.observe(record.now() - parked_s)

    def _of(self, metric: Metric, record: RequestRecord) -> Counter:
        return self.store.counter(metric.name, record.model or "", self._tenant(record))

    def _tenant(self, record: RequestRecord) -> str:
        """Return the label of a request's tenant."""
        tenant, key = record.standing.tenant, record.key_name or ""
        if tenant in ("", key):
            return key  # as many as the configuration has
        if tenant not in self._tenants and len(self._tenants) >= MAX_GATEWAY_TENANTS:
            return OTHERS
        self._tenants.add(tenant)
        return tenant
