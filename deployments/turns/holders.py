"""Who has the turn of a light group, as its replicas read it in Ray's key-value store."""

import json
import logging
from collections.abc import Callable
from typing import Any, Final

from deployments.turns.planner import Turns

logger = logging.getLogger("ray.serve")

HOLDERS: Final = b"raystream-turns"
"""Namespace of the holders, in the key-value store of Ray's control service."""

RETRY_INTERVAL_S: Final = 10.0
"""When a store that was silent is asked again, since Serve's controller waits for it meanwhile."""

STORE_TIMEOUT_S: Final = 1.0
"""How long Ray's control service may take for a question; its client may wait as long again."""


def read_holder(application: str, group: str) -> str | None:
    """Return the deployment that has the turn of a light group; None if none has had one yet.

    Raises:
        Exception: Ray's control service does not answer within `STORE_TIMEOUT_S`.
    """
    client = _store()
    if client is None:  # no Ray
        return None
    key = _holder_key(application, group)
    stored = client.internal_kv_multi_get([key], HOLDERS, timeout=STORE_TIMEOUT_S)
    return str(json.loads(stored[key])["holder"]) if key in stored else None


def write_holder(application: str, group: str, deployment: str) -> None:
    """Say which deployment of a light group has the turn.

    Raises:
        Exception: Ray's control service does not answer within `STORE_TIMEOUT_S`.
    """
    client = _store()
    if client is not None:
        value = json.dumps({"holder": deployment}).encode()
        key = _holder_key(application, group)
        client.internal_kv_put(key, value, True, HOLDERS, timeout=STORE_TIMEOUT_S)


def _holder_key(application: str, group: str) -> bytes:
    return f"{application}#{group}".encode()


def _store() -> Any:
    """Return a client of Ray's control service; None without Ray."""
    # Here, since a plan of the turns does without Ray.
    from ray.experimental.internal_kv import internal_kv_get_gcs_client

    return internal_kv_get_gcs_client()  # type: ignore[no-untyped-call] # Ray leaves it untyped


class PublishedHolder:
    """Who has the turn of a light group, as its replicas read it.

    While the store is silent they go on with the one that they know.
    """

    def __init__(
        self,
        group: str,
        now_s: Callable[[], float],
        read: Callable[[str, str], str | None],
        write: Callable[[str, str, str], None],
    ) -> None:
        self._group = group
        self._now_s = now_s
        self._read = read
        self._write = write
        self._holder: str | None = None
        self._is_read = False
        self._next_s = now_s()

    def find(self, application: str, turns: Turns) -> bool:
        """Give the turn to the model that had it under an earlier controller.

        Returns:
            Whether that was found out by now.
        """
        if not self._is_read:
            self._is_read = self._ask(lambda: self._note(self._read(application, self._group)))
            if self._holder is not None and self._holder in turns.models:
                turns.begin(self._holder)
        return self._is_read

    def publish(self, application: str, holder: str) -> None:
        """Say who has the turn, unless that is known."""
        if holder != self._holder and self._ask(
            lambda: self._write(application, self._group, holder)
        ):
            self._note(holder)

    def _note(self, holder: str | None) -> None:
        self._holder = holder

    def _ask(self, question: Callable[[], None]) -> bool:
        """Ask the store, unless it was silent a moment ago; return whether it has answered."""
        if self._now_s() < self._next_s:
            return False
        try:
            question()
        except Exception as error:  # noqa: BLE001 - any of Ray's; scaling goes on
            logger.warning("turns of %s: Ray's store does not answer: %r", self._group, error)
            self._next_s = self._now_s() + RETRY_INTERVAL_S
            return False
        return True
