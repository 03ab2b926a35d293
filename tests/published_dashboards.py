"""What dashboards that others have published ask for: names of metrics and labels, nothing else.

Source: https://github.com/vllm-project/vllm, commit 4b5c627c23e6690b8987100d1cbf78e34ac14bf9,
examples/observability/prometheus_grafana/grafana.json
"""

from collections.abc import Mapping
from typing import Final

MODEL: Final = frozenset({"model_name"})
BUCKET: Final = frozenset({"model_name", "le"})

VLLM: Final[Mapping[str, frozenset[str]]] = {
    "vllm:e2e_request_latency_seconds_bucket": BUCKET,
    "vllm:e2e_request_latency_seconds_count": MODEL,
    "vllm:e2e_request_latency_seconds_sum": MODEL,
    "vllm:generation_tokens_total": MODEL,
    "vllm:inter_token_latency_seconds_bucket": BUCKET,
    "vllm:inter_token_latency_seconds_count": MODEL,
    "vllm:inter_token_latency_seconds_sum": MODEL,
    "vllm:kv_cache_usage_perc": MODEL,
    "vllm:num_requests_running": MODEL,
    "vllm:num_requests_waiting": MODEL,
    "vllm:prompt_tokens_total": MODEL,
    "vllm:request_decode_time_seconds_sum": MODEL,
    "vllm:request_generation_tokens_bucket": BUCKET,
    "vllm:request_max_num_generation_tokens_sum": MODEL,
    "vllm:request_prefill_time_seconds_sum": MODEL,
    "vllm:request_prompt_tokens_bucket": BUCKET,
    "vllm:request_queue_time_seconds_sum": MODEL,
    "vllm:request_success_total": MODEL | {"finished_reason"},
    "vllm:time_to_first_token_seconds_bucket": BUCKET,
    "vllm:time_to_first_token_seconds_count": MODEL,
    "vllm:time_to_first_token_seconds_sum": MODEL,
}
"""The metrics of vLLM's dashboard, each with the labels that it filters or groups by."""

LACKING_IN_RAY: Final = (
    "ray_vllm_num_requests_swapped",
    "ray_vllm_external_prefix_cache_",
    "ray_vllm_kv_offload_",
    "ray_vllm_nixl_",
)
"""What Ray's own dashboard asks for and raystream lacks; docs/metrics.md says why."""
