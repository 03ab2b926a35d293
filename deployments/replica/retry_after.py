"""Refusals: their `Retry-After`, from how fast the replica finishes requests, and their number."""

from collections import deque
from math import ceil

from deployments.contract.errors import OverloadedError, OverloadReason

WINDOW_S = 30.0
"""The window of the measurement; older ends say little about the current load."""

REFUSALS_WINDOW_S = 5.0
"""How long a refused request counts as load."""

MIN_RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 60


class RetryEstimator:
    """Counts the requests that ended, and those that were refused, in sliding windows.

    The caller passes the time.
    """

    def __init__(self) -> None:
        self._ended_at_s: deque[float] = deque()
        self._refused_at_s: deque[float] = deque()
        self._busy_since_s = 0.0

    def start(self, now_s: float) -> None:
        """Start measuring: an idle replica has received work."""
        self._ended_at_s.clear()
        self._busy_since_s = now_s

    def note_end(self, now_s: float) -> None:
        """Count a request that has ended."""
        self._ended_at_s.append(now_s)
        # Forget here too: a replica that never refuses a request never calls `seconds_for`.
        _forget(self._ended_at_s, now_s - WINDOW_S)

    def num_refused(self, now_s: float) -> int:
        """Return how many requests were refused within `REFUSALS_WINDOW_S`."""
        _forget(self._refused_at_s, now_s - REFUSALS_WINDOW_S)
        return len(self._refused_at_s)

    def seconds_for(self, num_requests: int, now_s: float) -> float:
        """Return the estimated time until `num_requests` more have ended.

        If none has ended yet, assume that one takes as long as the replica has been busy: it takes
        at least that long.
        """
        start_s = max(self._busy_since_s, now_s - WINDOW_S)
        _forget(self._ended_at_s, start_s)
        return num_requests * (now_s - start_s) / max(1, len(self._ended_at_s))

    def retry_after_s(self, num_requests: int, now_s: float) -> int:
        """Return in how many whole seconds to retry, if `num_requests` have to end first."""
        seconds = ceil(self.seconds_for(num_requests, now_s))
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, seconds))

    def overloaded(
        self,
        num_requests: int,
        why: str,
        now_s: float,
        reason: OverloadReason = OverloadReason.REQUESTS,
    ) -> OverloadedError:
        """Refuse a request until `num_requests` have ended: count it and return its error."""
        self._refused_at_s.append(now_s)
        _forget(self._refused_at_s, now_s - REFUSALS_WINDOW_S)
        return self.error(num_requests, why, now_s, reason)

    def error(
        self,
        num_requests: int,
        why: str,
        now_s: float,
        reason: OverloadReason = OverloadReason.REQUESTS,
    ) -> OverloadedError:
        """Return the error for a request that has to wait until `num_requests` have ended."""
        retry_after_s = self.retry_after_s(num_requests, now_s)
        message = f"The model is overloaded: {why}. Try again in {retry_after_s} s."
        return OverloadedError(message, None, retry_after_s, reason)


def _forget(times_s: deque[float], before_s: float) -> None:
    while times_s and times_s[0] < before_s:
        times_s.popleft()
