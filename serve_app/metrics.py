"""The metrics of an ingress: counts that no replica of a model can keep.

A refused request is counted only here, where its client is answered, because it may have been
offered to several replicas, or to none. Ray adds the tags of the ingress's own deployment and
replica; we add the model as a tag.
"""

from collections.abc import Callable

from ray.serve.metrics import Counter


class IngressMetrics:
    """Records what an ingress does."""

    def __init__(self) -> None:
        self._refused = Counter(
            "requests_refused_total",
            description="Requests for which there was no room.",
            tag_keys=("model",),
        )

    def refusals_of(self, model_id: str) -> Callable[[], None]:
        """Return a function that counts one refused request of a model."""
        return lambda: self._refused.inc(tags={"model": model_id})
