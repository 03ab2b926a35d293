"""Tells streams that their replica is about to end: they go on at another one, or are parked.

A replica is about to end once Serve has taken it out of the running set to stop it, or once its
node is about to stop. Serve also takes a replica out of that set while it is reconfigured, and
while the controller recovers; so the controller is asked which of the two it is.

If no replica is left, streams end with theirs, unless Serve wants none of the model: then its turn
on the device is over (`deployments.turns`), and the streams wait for the next one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from serve_app.backends.replicas.running_replicas import ReplicaFacts, RunningReplicas

logger = logging.getLogger("ray.serve")

TICK_S: Final = 1.0
"""How often a stream whose replica is about to end is told so, until it has left."""

STOPPING: Final = "STOPPING"
"""Serve's state of a replica that it stops."""


@dataclass(frozen=True, slots=True)
class ServeReplicas:
    """What Serve's controller says about the replicas of one model.

    Attributes:
        states: Serve's state of each replica, by Serve's id.
        is_any_wanted: Whether the model shall have replicas that work now; also true if it is being
            deleted, after which it never has any.
    """

    states: Mapping[str, str]
    is_any_wanted: bool = True


class Departure(Enum):
    """How a stream shall leave its replica."""

    MOVE = auto()
    """Another replica can go on with it."""

    PARK = auto()
    """No replica runs until the model's next turn."""


AskReplicas = Callable[[], Awaitable[ServeReplicas]]
"""Asks Serve's controller; may raise anything."""

OnDue = Callable[[Departure], object]


class Departures:
    """The open streams of one model, by replica."""

    def __init__(self, running: RunningReplicas, ask: AskReplicas) -> None:
        """Start without a stream.

        Args:
            running: The model's replicas.
            ask: Asked about replicas that have left the running set and hold streams.
        """
        self._running = running
        self._ask = ask
        self._watches: dict[str, dict[object, OnDue]] = {}
        self._stopping: set[str] = set()  # replicas that do not come back
        self._is_turn_over = False  # by the last answer, while replicas with streams are absent

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
        departure = self._departure_of(replica_id)
        if departure is not None:  # it left while it accepted the stream
            asyncio.get_running_loop().call_soon(on_due, departure)
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
        for replica_id in list(self._watches):
            departure = self._departure_of(replica_id)
            if departure is not None:
                for on_due in list(self._watches[replica_id].values()):
                    on_due(departure)

    async def is_turn_over(self, replica_id: str) -> bool:
        """Return whether Serve wants no replica: streams of a lost one then wait for the next turn.

        Args:
            replica_id: The one that was lost. Serve's routers may not have heard of that yet.
        """
        if self._running.ids - {replica_id}:
            return False
        found = await self._asked()
        return found is not None and not found.is_any_wanted

    async def _asked(self) -> ServeReplicas | None:
        """Ask the controller; None if it does not answer."""
        try:
            return await self._ask()
        except Exception as error:  # noqa: BLE001 - any of Ray's; the next tick asks again
            logger.warning("Serve's controller did not tell the states of replicas: %s", error)
            return None

    async def _look_for_stopping(self) -> None:
        """Find out which of the replicas that have left the running set don't come back."""
        absent = {each for each in self._watches if not self._running.is_running(each)}
        self._stopping &= absent
        if not absent:
            self._is_turn_over = False
        is_last_gone = bool(absent) and not self._running.has_any
        if not (absent - self._stopping or is_last_gone):
            return
        found = await self._asked()
        if found is None:
            return
        states = found.states
        self._is_turn_over = not found.is_any_wanted
        self._stopping |= {each for each in absent if states.get(each, STOPPING) == STOPPING}

    def _departure_of(self, replica_id: str) -> Departure | None:
        """Return how the streams of a replica shall leave it; None if they stay."""
        replica = self._running.find(replica_id)
        if replica is None or not self._is_leaving(replica):
            return None
        if self._running.has_successor(replica):
            return Departure.MOVE
        is_over = self._is_turn_over and not self._running.has_any
        return Departure.PARK if is_over else None

    def _is_leaving(self, replica: ReplicaFacts) -> bool:
        return replica.replica_id in self._stopping or self._running.is_on_draining_node(replica)
