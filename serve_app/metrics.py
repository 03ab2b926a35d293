"""The metrics of an ingress: what no replica of a model gets to know."""

from collections.abc import Callable
from functools import partial

from ray.serve.metrics import Counter

from deployments.metrics import COUNTERS

REFUSED = "requests_refused_total"


class IngressMetrics:
    """Records what an ingress does by itself.

    The names are those of the replicas' metrics, so that sums hold; Ray's tags tell them apart.
    """

    def __init__(self) -> None:
        """Register the metrics."""
        self._refused = Counter(REFUSED, description=COUNTERS[REFUSED], tag_keys=("model",))

    def refusals_of(self, model_id: str) -> Callable[[], None]:
        """Return what records a request for which a model had no room."""
        return partial(self._refused.inc, tags={"model": model_id})
