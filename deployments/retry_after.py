"""How fast a replica gets its requests done, measured while it is busy."""

from collections import deque
from math import ceil

from deployments.errors import OverloadedError

WINDOW_S = 30.0
"""What lies further back tells little of the load that is there now."""

MIN_RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 60


class DrainRate:
    """Counts what ended in a sliding window; the caller brings the time."""

    def __init__(self) -> None:
        """Start idle."""
        self._ended_at_s: deque[float] = deque()
        self._busy_since_s = 0.0

    def start(self, now_s: float) -> None:
        """Begin to measure: work has come to a replica that had none."""
        self._ended_at_s.clear()
        self._busy_since_s = now_s

    def note_end(self, now_s: float) -> None:
        """Count a request that has made room."""
        self._ended_at_s.append(now_s)
        # Here too: a replica that is busy for weeks and refuses nobody is never asked.
        self._forget(now_s - WINDOW_S)

    def seconds_for(self, num_requests: int, now_s: float) -> float:
        """Return how long it will take until so many more have ended.

        Where none has ended yet, one is taken to end in as long as was waited so far: that is the
        least that is known.
        """
        start_s = max(self._busy_since_s, now_s - WINDOW_S)
        self._forget(start_s)
        return num_requests * (now_s - start_s) / max(1, len(self._ended_at_s))

    def retry_after_s(self, num_requests: int, now_s: float) -> int:
        """Return when to come back, where so many more have to end first: whole seconds."""
        seconds = ceil(self.seconds_for(num_requests, now_s))
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, seconds))

    def overloaded(self, num_requests: int, why: str, now_s: float) -> OverloadedError:
        """Return the refusal of a request, where so many more have to end first."""
        retry_after_s = self.retry_after_s(num_requests, now_s)
        message = f"The model is overloaded: {why}. Try again in {retry_after_s} s."
        return OverloadedError(message, None, retry_after_s)

    def _forget(self, before_s: float) -> None:
        while self._ended_at_s and self._ended_at_s[0] < before_s:
            self._ended_at_s.popleft()
