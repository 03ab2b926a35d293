"""The replicas of a model that have answered lately, and calls that are offered to several.

Ray does not tell its callers how many replicas there are or which one took a call, so this module
learns both from the replicas' own answers.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from deployments.contract import Accepted, Pooled, Refused
from deployments.errors import ModelChangedError, OverloadedError
from serve_app.backends.admission_queue import FullError

T = TypeVar("T")

MEMORY_S = 60.0
"""How long a replica counts as known after its answer. Serve stops idle replicas without notice."""

MAX_ATTEMPTS = 3
"""The most replicas that a request is offered to, one after the other, while all refuse it."""


class KnownReplicas:
    """Remembers which replicas have answered."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start without any known replica.

        Args:
            now: Returns seconds that never run backwards.
        """
        self._now = now
        self._heard_at_s: dict[str, float] = {}

    def hear(self, answer: Accepted | Pooled | Refused) -> None:
        """Remember that a replica has answered.

        Raises:
            FullError: It has no room for any request.
            OverloadedError: It has no room for this request.
            ModelChangedError: It is another version than the request needs.
        """
        self._heard_at_s[answer.replica_id] = self._now()
        if isinstance(answer, Refused) and answer.is_other_version:
            raise ModelChangedError(answer.message, None, answer.retry_after_s)
        if isinstance(answer, Refused) and answer.is_full:
            raise FullError(answer.message, answer.retry_after_s, answer.reason, answer.replica_id)
        if isinstance(answer, Refused):
            raise OverloadedError(answer.message, None, answer.retry_after_s, answer.reason)

    def count(self) -> int:
        """Return how many replicas have answered within `MEMORY_S`."""
        now_s = self._now()
        for replica_id in [r for r, at_s in self._heard_at_s.items() if now_s - at_s > MEMORY_S]:
            del self._heard_at_s[replica_id]
        return len(self._heard_at_s)

    async def until_taken(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call, and repeat it while replicas refuse it, once for each known replica.

        The router may pick a full replica while another has room, since each ingress learns late
        about the load from other ingresses. By the next call it knows that the first is busier, and
        no longer prefers it for the prompt's beginning.

        Args:
            call: Asks the replica that the router picks, and passes its answer to `hear`.

        Raises:
            FullError: All replicas are full. It carries the shortest wait of their refusals.
            OverloadedError: All replicas that were asked refused. Also with the shortest wait.
            ModelChangedError: They are all of another version than the request needs.
        """
        refusals: list[OverloadedError] = []
        others: list[ModelChangedError] = []
        while True:
            try:
                return await call()
            except OverloadedError as error:
                refusals.append(error)
            except ModelChangedError as error:
                others.append(error)
            if len(refusals) + len(others) >= min(MAX_ATTEMPTS, self.count()):
                raise self._summary(refusals) if refusals else others[-1]

    def _summary(self, refusals: Sequence[OverloadedError]) -> OverloadedError:
        """Return the refusal with the shortest wait; `FullError` only if all are full."""
        full = {refusal.replica_id for refusal in refusals if isinstance(refusal, FullError)}
        least = min(refusals, key=lambda refusal: refusal.retry_after_s or 0)
        return least if len(full) >= self.count() else OverloadedError(*least.args)
