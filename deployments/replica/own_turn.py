"""This replica's turn in its light group: the models of one sleep lightly while another one works.

Two things let a replica hold memory for weights, keys and values. The policy says which model has
the turn (`deployments.turns`), and a lease lets only one process of a node hold that memory. With
the lease alone, the wrong model could wake after a kill. Without it, two models could hold memory
while one of them gives its own back, starts, or dies.
"""

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self
from urllib.parse import quote

from ray import serve

from deployments.replica.own_actor import is_actor, session_folder
from deployments.turns import read_holder

logger = logging.getLogger("ray.serve.raystream.replica")

INTERVAL_S: Final = 0.1
"""How often a replica looks whether its turn has come, or is over: a small part of a swap."""


class TurnLease:
    """A lock on a file, which one process of a node holds; the kernel frees it with the process.

    It is no longer free while a child holds its copy of the descriptor, so no program that this
    process starts gets one.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, and hold nothing.

        Args:
            path: The file; it stays.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self.is_held = False

    def try_take(self) -> bool:
        """Take the lease unless another process holds it; return whether it is held."""
        if not self.is_held:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self.is_held = True
        return True

    def free(self) -> None:
        """Let others take the lease; do nothing if it is not held."""
        if self.is_held:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.is_held = False

    def close(self) -> None:
        """Free the lease for good; a replica leaves that to its process's end."""
        self.is_held = False
        os.close(self._descriptor)


class OwnTurn:
    """Whether this replica's model has the turn, and the lease; see `light_sleep.Turn`."""

    def __init__(
        self,
        lease: TurnLease,
        deployment: str,
        read: Callable[[], str | None],
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Start without the turn.

        Args:
            lease: The group's lease on this node.
            deployment: The deployment of this replica's model.
            read: Reads which deployment has the turn, in any thread; may raise anything.
            interval_s: Seconds between two looks.
        """
        self._lease = lease
        self._deployment = deployment
        self._read = read
        self._interval_s = interval_s
        self._is_mine = self._is_silent = False

    @classmethod
    def of(cls, group: str | None) -> Self | None:
        """Return this replica's turn in a light group; None if it is in none, or is no actor."""
        if group is None or not is_actor():
            return None
        context = serve.get_replica_context()
        app, deployment = context.app_name, context.deployment
        file = f"{quote(app, safe='')}#{quote(group, safe='')}.lock"
        lease = TurnLease(session_folder("raystream-turns") / file)
        return cls(lease, deployment, lambda: read_holder(app, group))

    def wait_to_load(self, is_stopped: Callable[[], bool], ask_interval_s: float = 1.0) -> bool:
        """Wait for the lease, whosever turn it is: a model that has no turn sleeps once loaded.

        Args:
            is_stopped: Asked from time to time whether this replica shall end: Serve can't tell one
                that waits here, and would wait for it.
            ask_interval_s: Seconds between two questions.

        Returns:
            Whether the lease is held; else the replica shall end.
        """
        ask_s = time.monotonic() + ask_interval_s
        while not self._lease.try_take():
            time.sleep(self._interval_s)
            if time.monotonic() >= ask_s:
                if is_stopped():
                    return False
                ask_s = time.monotonic() + ask_interval_s
        return True

    async def taken(self) -> None:
        """Wait until the model has the turn, and take the lease."""
        while not (await self._look() and self._lease.try_take()):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(self._interval_s)

    async def over(self) -> None:
        """Wait until the model does not have the turn."""
        while await self._look():  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(self._interval_s)

    def free(self) -> None:
        """Let another model take the lease: all memory has been given back."""
        self._lease.free()

    async def _look(self) -> bool:
        """Return whether the model has the turn, by the last answer of Ray's control service."""
        try:
            holder = await asyncio.to_thread(self._read)
        except Exception as error:  # noqa: BLE001 - any of Ray's; what runs goes on
            if not self._is_silent:
                logger.warning("%s: whose turn it is can't be read: %r", self._deployment, error)
            self._is_silent = True
        else:
            self._is_silent, self._is_mine = False, holder == self._deployment
        return self._is_mine
