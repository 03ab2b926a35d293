"""The recent use of each API key, in counts that all replicas of the ingress share.

If keys with limits are configured, one replica of `KeyLedger` runs next to the ingress, so that
several ingresses admit no more than one would. It decides and counts in memory. When it dies, Serve
starts another one with full buckets. Until then requests of limited keys are refused (see
`rate_limits`); requests of other keys never reach the ledger.

A limit per minute is a bucket that refills steadily, as OpenAI's limits do: a client may use a
minute's worth at once, and regains it bit by bit. The cost of a request may be known only at its
end, so a bucket can be overdrawn. It must then refill first, so that in the long run no more than
the limit passes.

Source: https://en.wikipedia.org/wiki/Token_bucket
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from serve_app.clock import Clock, SystemClock
from serve_app.config import ApiKey

LEASE_S = 3600.0
"""How long a request counts as a stream if its end is never reported, as when its ingress died."""

STREAM_RETRY_S = 1.0
"""The wait suggested when a key has too many streams: it is not known when one of them ends."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """The unused part of one limit.

    Attributes:
        limit: Requests or tokens per minute.
        remaining: How many of them may be used at once.
        reset_s: Seconds until all of it may be used again.
    """

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on a request, and the allowances that its key has left after it.

    Attributes:
        refused_by: The limit that is used up; None means that the request may go on.
        retry_after_s: Seconds until a retry makes sense; 0 if the request may go on.
        requests: The requests that are left; None if the key has no such limit.
        tokens: The tokens that are left; None if the key has no such limit.
    """

    refused_by: Literal["requests", "tokens", "streams"] | None
    retry_after_s: float
    requests: Allowance | None
    tokens: Allowance | None


class TokenBucket:
    """A limit per minute. Holds at most a minute's worth, and starts full."""

    def __init__(self, limit_per_minute: int, now_s: float) -> None:
        self.limit = limit_per_minute
        self._per_s = limit_per_minute / 60
        self._level = float(limit_per_minute)
        self._updated_s = now_s

    def level(self, now_s: float) -> float:
        """Return how much the bucket holds; less than 0 if it is overdrawn."""
        self._level = min(self.limit, self._level + (now_s - self._updated_s) * self._per_s)
        self._updated_s = now_s
        return self._level

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount out, even if the bucket holds less."""
        self._level = self.level(now_s) - amount

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the bucket holds 1."""
        missing = 1 - self.level(now_s)
        # Rounding may leave the level slightly below 1.
        return missing / self._per_s if missing > 1e-9 else 0.0

    def full_s(self, now_s: float) -> float:
        """Return the seconds until the bucket is full."""
        return (self.limit - self.level(now_s)) / self._per_s


class _Account:
    """One key's buckets and running requests."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.requests = _bucket(key.requests_per_minute, now_s)
        self.tokens = _bucket(key.tokens_per_minute, now_s)
        self._max_streams = key.max_concurrent_streams
        # When each lease ends, by ticket, the oldest first.
        self._streams: dict[str, float] = {}

    def admit(self, ticket: str, now_s: float) -> Verdict:
        self._drop_expired(now_s)
        refused_by, retry_after_s = self._obstacle(now_s)
        if refused_by is None:
            self._streams[ticket] = now_s + LEASE_S
            if self.requests:
                self.requests.take(1, now_s)
        return Verdict(
            refused_by, retry_after_s, _left(self.requests, now_s), _left(self.tokens, now_s)
        )

    def settle(self, ticket: str, num_tokens: int, now_s: float) -> None:
        self._streams.pop(ticket, None)
        if self.tokens:
            self.tokens.take(num_tokens, now_s)

    def _obstacle(
        self, now_s: float
    ) -> tuple[Literal["requests", "tokens", "streams"] | None, float]:
        if self.requests and (wait_s := self.requests.wait_s(now_s)):
            return "requests", wait_s
        if self.tokens and (wait_s := self.tokens.wait_s(now_s)):
            return "tokens", wait_s
        if self._max_streams is not None and len(self._streams) >= self._max_streams:
            return "streams", STREAM_RETRY_S
        return None, 0.0

    def _drop_expired(self, now_s: float) -> None:
        for ticket, end_s in list(self._streams.items()):
            if end_s > now_s:
                break
            del self._streams[ticket]


class KeyLedger:
    """Keeps an account for each limited key.

    Its methods never await, so no other call runs between a check and the count that follows it.
    """

    def __init__(self, keys: Sequence[ApiKey], clock: Clock | None = None) -> None:
        """Open an account for each key.

        Args:
            keys: The keys with limits.
            clock: None takes the machine's own.
        """
        self._clock = clock or SystemClock()
        now_s = self._clock.monotonic_s()
        self._accounts = {key.name: _Account(key, now_s) for key in keys}

    async def admit(self, name: str, ticket: str) -> Verdict:
        """Decide on a request, and count it if it may go on.

        Args:
            name: The key's name.
            ticket: Identifies the request in this ledger. It must not be the client's own request
                id, which a client may use twice.
        """
        return self._accounts[name].admit(ticket, self._clock.monotonic_s())

    async def settle(self, name: str, ticket: str, num_tokens: int) -> None:
        """Record that a request has ended, and how many tokens it took.

        The key may have been removed while a request of an older ingress was still running; such a
        request is ignored.
        """
        if name in self._accounts:
            self._accounts[name].settle(ticket, num_tokens, self._clock.monotonic_s())


def _bucket(limit: int | None, now_s: float) -> TokenBucket | None:
    return None if limit is None else TokenBucket(limit, now_s)


def _left(bucket: TokenBucket | None, now_s: float) -> Allowance | None:
    if bucket is None:
        return None
    return Allowance(bucket.limit, max(0, int(bucket.level(now_s))), bucket.full_s(now_s))
