"""The definitions of the replicas' metrics, under the names that dashboards made for vLLM ask for.

Names that begin with `vllm_` mean what they mean in vLLM; `raystream_` begins those that it lacks.
If generators and poolers have a metric of the same name, it is the same definition: Ray merges
both into one.
"""

from typing import Final

from deployments.contract.output import FinishReason
from deployments.contract.telemetry.memory_report import Watched
from deployments.contract.telemetry.metric_store import Kind, Metric

LATENCY_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0),
)
"""From a small model's first token to an hour's answer."""

TOKEN_BUCKETS_S: Final = (
    *(0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""The time of one token: closer where readers notice a difference, from 20 to 100 ms."""

LENGTH_BUCKETS: Final = tuple(
    float(digit * 10**exponent) for exponent in range(6) for digit in (1, 2, 5)
)
"""Tokens of a prompt or an answer, from 1 to 500,000."""

SEQUENCE_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
BATCH_BUCKETS: Final = tuple(32.0 * 2**exponent for exponent in range(10))

FINISHED: Final = (FinishReason.STOP, FinishReason.LENGTH)
"""The reasons of an answer that is complete."""


def _gauge(name: str, description: str) -> Metric:
    return Metric(name, Kind.GAUGE, description)


def _counter(name: str, description: str) -> Metric:
    return Metric(name, Kind.COUNTER, description)


def _histogram(name: str, buckets: tuple[float, ...], description: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, description, buckets=buckets)


RUNNING: Final = _gauge("vllm_num_requests_running", "Sequences, or texts' requests, that run.")
WAITING: Final = _gauge("vllm_num_requests_waiting", "Sequences, or texts' requests, that wait.")
LONGEST_WAIT: Final = _gauge(
    "raystream_longest_wait_seconds",
    "How long the one has waited for its turn that waits longest; 0 if none waits.",
)
SERVICE_GAP: Final = _gauge(
    "raystream_service_gap_tokens",
    "How many weighted tokens lie between the most and the least served of the keys that wait, by "
    "their weights; each token of an answer counts twice.",
)
WAITING_FOR: Final = Metric(
    "raystream_requests_waiting",
    Kind.GAUGE,
    "Sequences that wait, by the reason: for their turn, for KV memory, or displaced by a better "
    "priority or by a key with less than its share.",
    ("model_name", "reason"),
)
KV_USAGE: Final = _gauge(
    "vllm_kv_cache_usage_perc", "KV memory that running sequences hold, from 0 to 1."
)
STARTED: Final = _gauge(
    "raystream_replica_start_time_seconds", "When the replica was ready, in Unix seconds."
)
PROMPT_TOKENS: Final = _counter(
    "vllm_prompt_tokens_total",
    "Tokens of prompts that the replica has accepted; a stream that has moved here counts at its "
    "first replica only.",
)
GENERATION_TOKENS: Final = _counter(
    "vllm_generation_tokens_total", "Tokens that the replica has generated."
)
PREFIX_QUERIES: Final = _counter(
    "vllm_prefix_cache_queries_total", "Prompt tokens that were looked up in the KV memory."
)
PREFIX_HITS: Final = _counter(
    "vllm_prefix_cache_hits_total", "Prompt tokens found there and not computed again."
)
PREEMPTIONS: Final = _counter(
    "vllm_num_preemptions_total", "Running sequences that had to wait again for memory."
)
ASLEEP: Final = _gauge(
    "raystream_replica_asleep", "1 while the replica sleeps lightly, and holds no weights; else 0."
)
ASLEEP_MEMORY: Final = _gauge(
    "raystream_replica_asleep_memory_bytes",
    "Memory of the replica's process right after it last fell asleep, without pages of files.",
)
WAKE_TIME: Final = _gauge(
    "raystream_replica_last_wake_seconds", "How long the replica last took to wake."
)
SUCCESSES: Final = Metric(
    "vllm_request_success_total",
    Kind.COUNTER,
    "Sequences, or texts' requests, that are complete.",
    ("model_name", "finished_reason"),
    values=tuple(reason.value for reason in FINISHED),
)
TTFT: Final = _histogram(
    "vllm_time_to_first_token_seconds",
    LATENCY_BUCKETS_S,
    "From the request's arrival to its first token.",
)
ITL: Final = _histogram(
    "vllm_inter_token_latency_seconds",
    TOKEN_BUCKETS_S,
    "Time between two tokens, once for each token after the first.",
)
TPOT: Final = _histogram(
    "vllm_request_time_per_output_token_seconds",
    TOKEN_BUCKETS_S,
    "An answer's mean time for each token after the first.",
)
E2E: Final = _histogram(
    "vllm_e2e_request_latency_seconds",
    LATENCY_BUCKETS_S,
    "From the request's arrival to its last token, or to a classifier's result.",
)
QUEUE_TIME: Final = _histogram(
    "vllm_request_queue_time_seconds",
    LATENCY_BUCKETS_S,
    "From the request's arrival until the engine begins with it.",
)
PREFILL_TIME: Final = _histogram(
    "vllm_request_prefill_time_seconds",
    LATENCY_BUCKETS_S,
    "From then to the first token.",
)
DECODE_TIME: Final = _histogram(
    "vllm_request_decode_time_seconds",
    LATENCY_BUCKETS_S,
    "From the first token to the last.",
)
PROMPT_LENGTH: Final = _histogram(
    "vllm_request_prompt_tokens", LENGTH_BUCKETS, "Tokens of a complete answer's prompt."
)
ANSWER_LENGTH: Final = _histogram(
    "vllm_request_generation_tokens",
    LENGTH_BUCKETS,
    "Tokens of a complete answer, with those of earlier replicas.",
)
MAX_ANSWER_LENGTH: Final = _histogram(
    "vllm_request_max_num_generation_tokens",
    LENGTH_BUCKETS,
    "The same: each of a request's answers is a sequence of its own.",
)
REPLICA_MEMORY: Final = _gauge(
    "raystream_replica_memory_bytes", "Memory of its device that the replica's process uses."
)
DEVICE_MEMORY_USED: Final = _gauge(
    "raystream_device_memory_used_bytes", "Memory of the replica's device that all processes use."
)
DEVICE_MEMORY_TOTAL: Final = _gauge(
    "raystream_device_memory_total_bytes", "Memory of the replica's device."
)
MEMORY_WARNINGS: Final = Metric(
    "raystream_memory_warnings_total",
    Kind.COUNTER,
    "How often memory has become short: the device's, or that of the replica's share.",
    ("model_name", "of"),
    values=tuple(Watched),
)
BATCH_SEQUENCES: Final = _histogram(
    "raystream_batch_sequences", SEQUENCE_BUCKETS, "Texts in a micro-batch."
)
BATCH_TOKENS: Final = _histogram(
    "raystream_batch_tokens", BATCH_BUCKETS, "Tokens in a micro-batch."
)

ANY_REPLICA: Final = (
    STARTED,
    REPLICA_MEMORY,
    DEVICE_MEMORY_USED,
    DEVICE_MEMORY_TOTAL,
    MEMORY_WARNINGS,
    LONGEST_WAIT,
    SERVICE_GAP,
    ASLEEP,
    ASLEEP_MEMORY,
    WAKE_TIME,
)
"""The metrics that every replica has, whatever its model does."""

GENERATOR: Final = (
    *ANY_REPLICA,
    RUNNING,
    WAITING,
    WAITING_FOR,
    KV_USAGE,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    PREFIX_QUERIES,
    PREFIX_HITS,
    PREEMPTIONS,
    SUCCESSES,
    TTFT,
    ITL,
    TPOT,
    E2E,
    QUEUE_TIME,
    PREFILL_TIME,
    DECODE_TIME,
    PROMPT_LENGTH,
    ANSWER_LENGTH,
    MAX_ANSWER_LENGTH,
)
"""The metrics of a text model's replica."""

LOAD: Final = frozenset(
    metric.name
    for metric in (
        RUNNING,
        WAITING,
        WAITING_FOR,
        LONGEST_WAIT,
        SERVICE_GAP,
        KV_USAGE,
        ASLEEP,
        REPLICA_MEMORY,
    )
)
"""The gauges that are zero once the replica is gone."""

OF_LIVE: Final = frozenset(m.name for m in (STARTED, DEVICE_MEMORY_USED, DEVICE_MEMORY_TOTAL))
"""The gauges that only a replica that runs has."""

POOLER: Final = (
    *ANY_REPLICA,
    RUNNING,
    WAITING,
    PROMPT_TOKENS,
    SUCCESSES,
    E2E,
    BATCH_SEQUENCES,
    BATCH_TOKENS,
)
"""The metrics of a replica that classifies or embeds."""
