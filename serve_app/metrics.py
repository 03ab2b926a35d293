"""The metrics of an ingress: what no replica of a model gets to know.

The names are those of the replicas' metrics, so that sums hold; Ray's tags tell them apart.
"""

from collections.abc import Callable
from typing import Final

from ray.serve.metrics import Counter

from deployments.metrics import COUNTERS

REFUSED: Final = "requests_refused_total"


class IngressMetrics:
    """Records what an ingress does by itself."""

    def __init__(self) -> None:
        """Register the metrics."""
        self._refused = Counter(REFUSED, description=COUNTERS[REFUSED], tag_keys=("model",))

    def refusals_of(self, model_id: str) -> Callable[[int], None]:
        """Return what counts requests for which a model had no room."""
        return lambda num: self._refused.inc(num, tags={"model": model_id})
