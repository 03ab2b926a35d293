"""Two measurements that alternate, compared: machines are noisy, so each is paired and repeated."""

import statistics
from collections.abc import Iterable


def compared(pairs: Iterable[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the median of the first, that of the second, and that of the pairs' first / second."""
    both = list(pairs)
    first, second = (statistics.median(column) for column in zip(*both, strict=True))
    return first, second, statistics.median(one / other for one, other in both)
