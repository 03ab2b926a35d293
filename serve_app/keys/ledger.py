"""What each API key has used lately: the counts that all replicas of the ingress share.

One replica of this runs beside the ingress where keys with limits are configured, so that several
ingresses admit no more than one would. It decides and counts in memory. When it dies, Serve starts
another one with full buckets; until then requests of limited keys are refused (see `rate_limits`),
others never ask here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from serve_app.api_keys import ApiKey
from serve_app.clock import Clock, SystemClock
from serve_app.token_bucket import TokenBucket

LEASE_S = 3600.0
"""A request whose end is never told, because its ingress died, counts as a stream for so long."""

STREAM_RETRY_S = 1.0
"""When a stream of a key ends is not known; this is when to look again."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of one limit.

    Attributes:
        limit: Per minute.
        remaining: What may be used at once.
        reset_s: When all of it may be used again.
    """

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a request may go on, and what its key has left after it.

    Attributes:
        refused_by: The limit that is used up; None means that the request may go on.
        retry_after_s: When it may come back; 0 if it may go on.
        requests: None if the key has no such limit.
        tokens: The same.
    """

    refused_by: Literal["requests", "tokens", "streams"] | None
    retry_after_s: float
    requests: Allowance | None
    tokens: Allowance | None


class _Account:
    """One key's buckets and running requests."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.requests = _bucket(key.requests_per_minute, now_s)
        self.tokens = _bucket(key.tokens_per_minute, now_s)
        self._max_streams = key.max_concurrent_streams
        # When each lease ends, by ticket, the oldest first.
        self._streams: dict[str, float] = {}

    def admit(self, ticket: str, now_s: float) -> Verdict:
        self._forget_the_lost(now_s)
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

    def _forget_the_lost(self, now_s: float) -> None:
        for ticket, end_s in list(self._streams.items()):
            if end_s > now_s:
                break
            del self._streams[ticket]


class KeyLedger:
    """Keeps an account for each limited key.

    Its methods never wait, so none can come between the looking and the counting of another.
    """

    def __init__(self, keys: Sequence[ApiKey], clock: Clock | None = None) -> None:
        """Open an account for each key.

        Args:
            keys: Those with limits.
            clock: The machine's own if None.
        """
        self._clock = clock or SystemClock()
        now_s = self._clock.monotonic_s()
        self._accounts = {key.name: _Account(key, now_s) for key in keys}

    async def admit(self, name: str, ticket: str) -> Verdict:
        """Decide on a request, and count it if it may go on.

        Args:
            name: The key's.
            ticket: Names the request, here alone: it must not be a client's own name for it.
        """
        return self._accounts[name].admit(ticket, self._clock.monotonic_s())

    async def settle(self, name: str, ticket: str, num_tokens: int) -> None:
        """Note that a request has ended, and what it took.

        An account may have gone with its key while a request of an older ingress ran on.
        """
        if name in self._accounts:
            self._accounts[name].settle(ticket, num_tokens, self._clock.monotonic_s())


def _bucket(limit: int | None, now_s: float) -> TokenBucket | None:
    return None if limit is None else TokenBucket(limit, now_s)


def _left(bucket: TokenBucket | None, now_s: float) -> Allowance | None:
    if bucket is None:
        return None
    return Allowance(bucket.limit, max(0, int(bucket.level(now_s))), bucket.full_s(now_s))
