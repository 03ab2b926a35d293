"""Tells streams that their replica is about to end, while there is another to go on at.

A replica is about to end once Serve has taken it out of the running set to stop it, or once its
node is about to stop. Serve also takes a replica out of that set while it is reconfigured, and
while the controller recovers; so the controller is asked which of the two it is.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

from serve_app.backends.replicas.running_replicas import ReplicaFacts, RunningReplicas

logger = logging.getLogger("ray.serve")

TICK_S: Final = 1.0
"""How often a stream whose replica is about to end is told so, until it has left."""

STOPPING: Final = "STOPPING"
"""Serve's state of a replica that it stops."""

AskStates = Callable[[], Awaitable[Mapping[str, str]]]
"""Returns Serve's state of each replica of the model, by Serve's id; may raise anything."""

OnDue = Callable[[], object]


class Departures:
    """The open streams of one model, by replica."""

    def __init__(self, running: RunningReplicas, ask_states: AskStates) -> None:
        """Start without a stream.

        Args:
            running: The model's replicas.
            ask_states: Asked about replicas that have left the running set and hold streams.
        """
        self._running = running
        self._ask_states = ask_states
        self._watches: dict[str, dict[object, OnDue]] = {}
        self._stopping: set[str] = set()  # replicas that do not come back

    def watch(self, replica_id: str, on_due: OnDue) -> Callable[[], None]:
        """Call a function when a stream should leave its replica, and again every `TICK_S`.

        Args:
            replica_id: The stream's replica.
            on_due: Called on the event loop.

        Returns:
            Ends that.
        """
        key = object()
        self._watches.setdefault(replica_id, {})[key] = on_due
        if self._is_due(replica_id):  # it left while it accepted the stream
            asyncio.get_running_loop().call_soon(on_due)
        return lambda: self._forget(replica_id, key)

    def _forget(self, replica_id: str, key: object) -> None:
        watches = self._watches.get(replica_id, {})
        watches.pop(key, None)
        if not watches:
            self._watches.pop(replica_id, None)

    async def run(self) -> None:
        """Tell streams, for as long as the application runs."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def on_change() -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(changed.set)

        stop_listening = self._running.listen(on_change)
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await changed.wait()
                changed.clear()
                await self.tell()
        finally:
            stop_listening()

    async def tell(self) -> None:
        """Tell each stream whose replica is about to end."""
        await self._look_for_stopping()
        for replica_id in [each for each in self._watches if self._is_due(each)]:
            for on_due in list(self._watches[replica_id].values()):
                on_due()

    async def _look_for_stopping(self) -> None:
        """Find out which of the replicas that have left the running set don't come back."""
        absent = {each for each in self._watches if not self._running.is_running(each)}
        self._stopping &= absent
        if not absent - self._stopping:
            return
        try:
            states = await self._ask_states()
        except Exception as error:  # noqa: BLE001 - any of Ray's; the next tick asks again
            logger.warning("Serve's controller did not tell the states of replicas: %s", error)
            return
        self._stopping |= {each for each in absent if states.get(each, STOPPING) == STOPPING}

    def _is_due(self, replica_id: str) -> bool:
        replica = self._running.find(replica_id)
        return (
            replica is not None
            and self._is_leaving(replica)
            and self._running.has_successor(replica)
        )

    def _is_leaving(self, replica: ReplicaFacts) -> bool:
        return replica.replica_id in self._stopping or self._running.is_on_draining_node(replica)
