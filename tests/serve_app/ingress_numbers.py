from deployments.contract.telemetry.metric_store import Metric
from serve_app.metrics import IngressMetrics


def numbers(metrics: IngressMetrics, metric: Metric) -> dict[tuple[str, ...], float]:
    """Return the numbers of a metric that are not zero, by its labels."""
    found = metrics.store.snapshot().series[metric.name]
    return {labels: number for labels, (number,) in found if number}
