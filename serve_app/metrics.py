"""The metrics of an ingress: what no replica of a model gets to know.

A refused request is counted here, where its client is told, and nowhere else: it may have been
shown to several replicas, or to none. Ray adds the tags of the ingress's own deployment and
replica; the model is a tag of ours.
"""

from collections.abc import Callable

from ray.serve.metrics import Counter


class IngressMetrics:
    """Records what an ingress does."""

    def __init__(self) -> None:
        """Register the metrics."""
        self._refused = Counter(
            "requests_refused_total",
            description="Requests for which there was no room.",
            tag_keys=("model",),
        )

    def refusals_of(self, model_id: str) -> Callable[[], None]:
        """Return what counts a request for which a model had no room."""
        return lambda: self._refused.inc(tags={"model": model_id})
