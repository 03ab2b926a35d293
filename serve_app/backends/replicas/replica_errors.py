"""How a call has lost its replica, and whether the replica had begun with it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Self

from deployments.contract.errors import RaystreamError, ReplicaUnavailableError

RETRY_AFTER_S: Final = 5.0
"""When to come back after no replica took over: by then a new one may be up."""


class ReplicaStoppedError(ReplicaUnavailableError):
    """The replica was stopped on purpose and has cancelled the request; it did not die of it."""


class LostAsleepError(ReplicaStoppedError):
    """The replica ends, and had not begun with the request, which waited for it to wake."""


class ParkedError(RaystreamError):
    """The replica has given the text back, for others to run; nothing was lost."""


class NoReplicaError(ReplicaUnavailableError):
    """Ray Serve has given up on starting a replica of the model."""

    @classmethod
    def of(cls, model_id: str, why: str | None) -> Self:
        """Return the error for a model.

        Args:
            model_id: The model.
            why: Why its replica could not start; None if that is not known.
        """
        reason = "" if why is None else f": {why}"
        message = f"The model {model_id!r} has failed, and no replica of it runs{reason}"
        return cls(message, None, RETRY_AFTER_S)


class NotBegunError(ReplicaUnavailableError):
    """The replica has announced that it may begin, and the go-ahead has not reached it in time."""


class LostAfterStartError(ReplicaUnavailableError):
    """A replica was lost after the ingress had let it begin, and before it accepted or answered."""


_PATIENCE: ContextVar[asyncio.Timeout | None] = ContextVar("patience", default=None)
"""The wait that ends when a replica begins with this task's request."""


@contextmanager
def unlimited_once_begun(wait: asyncio.Timeout) -> Iterator[None]:
    """Lift a wait's time limit once a replica begins with this task's suspect."""
    token = _PATIENCE.set(wait)
    try:
        yield
    finally:
        _PATIENCE.reset(token)


def wait_patiently() -> None:
    """Note that a replica begins with this task's suspect, which is no longer offered to others.

    Otherwise it could run at two replicas at once, and kill both.
    """
    wait = _PATIENCE.get()
    if wait is not None:
        wait.reschedule(None)
