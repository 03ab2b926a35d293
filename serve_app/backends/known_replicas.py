"""Which replicas of a model have answered lately, and calls that are shown to more than one.

Ray tells its callers neither how many there are nor which one a call went to; the replicas do.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from deployments.contract import Accepted, Classified, Refused
from deployments.errors import OverloadedError
from serve_app.opening_line import FullError

T = TypeVar("T")

MEMORY_S = 60.0
"""Serve stops replicas that are not needed, and nobody says goodbye."""

MAX_ATTEMPTS = 3
"""The replicas that a request is shown to, one after the other, while all refuse it."""


class KnownReplicas:
    """Remembers who has answered."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Know nobody.

        Args:
            now: Tells seconds that never run backwards.
        """
        self._now = now
        self._heard_at_s: dict[str, float] = {}

    def hear(self, answer: Accepted | Classified | Refused) -> None:
        """Remember that a replica has answered.

        Raises:
            FullError: It has no room for anything.
            OverloadedError: It has none for this request.
        """
        self._heard_at_s[answer.replica_id] = self._now()
        if isinstance(answer, Refused) and answer.is_full:
            raise FullError(answer.message, answer.retry_after_s, answer.replica_id)
        if isinstance(answer, Refused):
            raise OverloadedError(answer.message, None, answer.retry_after_s)

    def count(self) -> int:
        """Return how many have answered lately."""
        now_s = self._now()
        for replica_id in [r for r, at_s in self._heard_at_s.items() if now_s - at_s > MEMORY_S]:
            del self._heard_at_s[replica_id]
        return len(self._heard_at_s)

    async def until_taken(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call; make it again while replicas refuse it, as often as there are replicas.

        The router may pick a replica that is full while another has room, since each ingress knows
        the load of the others late. By the next call it sees that the first has more to do.

        Args:
            call: Asks whichever replica the router picks, and lets us `hear` it.

        Raises:
            FullError: All replicas are full; of this one it was expected for the least time.
            OverloadedError: All that were asked refuse; this one for the least time.
        """
        refusals: list[OverloadedError] = []
        while True:
            try:
                return await call()
            except OverloadedError as error:
                refusals.append(error)
            if len(refusals) >= min(MAX_ATTEMPTS, self.count()):
                raise self._verdict(refusals)

    def _verdict(self, refusals: Sequence[OverloadedError]) -> OverloadedError:
        """Return the refusal for the least time; that all are full is said only if all said so."""
        full = {refusal.replica_id for refusal in refusals if isinstance(refusal, FullError)}
        least = min(refusals, key=lambda refusal: refusal.retry_after_s or 0)
        return least if len(full) >= self.count() else OverloadedError(*least.args)
