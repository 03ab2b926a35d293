"""A limit per minute as a bucket that refills steadily.

OpenAI's own limits work so: a client may use a minute's worth at once, and what it has used comes
back bit by bit. What a request costs may be known only when it has ended, so a bucket can be
overdrawn; then it must first refill, and no more than the limit passes in the long run.

Source: https://en.wikipedia.org/wiki/Token_bucket
"""


class TokenBucket:
    """Holds at most a minute's worth, and is full at first."""

    def __init__(self, limit_per_minute: int, now_s: float) -> None:
        """Make a full bucket."""
        self.limit = limit_per_minute
        self._per_s = limit_per_minute / 60
        self._level = float(limit_per_minute)
        self._seen_s = now_s

    def level(self, now_s: float) -> float:
        """Return how much is in it; less than 0 if it is overdrawn."""
        self._level = min(self.limit, self._level + (now_s - self._seen_s) * self._per_s)
        self._seen_s = now_s
        return self._level

    def take(self, amount: float, now_s: float) -> None:
        """Take something out, whether or not it is in."""
        self._level = self.level(now_s) - amount

    def wait_s(self, now_s: float) -> float:
        """Return how long it takes until there is 1 in it."""
        missing = 1 - self.level(now_s)
        # What is due after n steps may fall short of 1 by a rounding.
        return missing / self._per_s if missing > 1e-9 else 0.0

    def full_s(self, now_s: float) -> float:
        """Return how long it takes until it is full."""
        return (self.limit - self.level(now_s)) / self._per_s
