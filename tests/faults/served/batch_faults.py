"""What is done to a server while it runs batches."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import httpx

from tests.faults.served.ingresses import Ingresses
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import is_alive, kill, reached
from tests.ray.serve_run import Server

REPLICAS = "ray::ServeReplica:raystream:"


@dataclass
class BatchFaults:
    """Faults of one server.

    Attributes:
        server: The server.
        deployed: Its file.
        num_killed: The replicas of models that were killed, by model.
    """

    server: Server
    deployed: Deployed
    num_killed: dict[str, int] = field(default_factory=dict)
    random: Random = field(default_factory=lambda: Random(41))

    async def kill_a_replica(self, *models: str) -> None:
        """Kill a replica of one of these models, by default of any, once one runs."""
        while not (running := await self._running(models)):  # noqa: ASYNC110 - Serve's state
            await asyncio.sleep(0.1)
        model, process_id = self.random.choice(running)
        kill(process_id)
        self.num_killed[model] = self.num_killed.get(model, 0) + 1

    @asynccontextmanager
    async def killing(self, interval_s: float) -> AsyncIterator[None]:
        """Kill a replica of any model at regular intervals."""

        async def kill_for_ever() -> None:
            while True:
                await self.kill_a_replica()
                await asyncio.sleep(interval_s)

        task = asyncio.create_task(kill_for_ever())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def kill_ingress(self, process_id: int, num_ingresses: int) -> None:
        """Kill an ingress, and wait until another is in its place."""
        kill(process_id)
        ingresses = Ingresses(self.server)
        await reached(
            lambda: (
                not is_alive(process_id)
                and len(list(filter(is_alive, ingresses.processes()))) == num_ingresses
            )
        )

    async def redeploy(self) -> None:
        """Deploy the file with another limit, and wait until all replicas are others."""
        before = {each.pid for each in self.server.processes(REPLICAS)}
        limits = self.deployed.application["args"]["limits"]
        limits["max_num_stops"] = 24 - limits["max_num_stops"]  # 16 or 8
        await self.deployed.apply()
        await reached(lambda: not any(map(is_alive, before)))

    async def _running(self, models: tuple[str, ...]) -> list[tuple[str, int]]:
        """Return the replicas of models that Serve routes to, and that live."""
        try:
            replicas = await self.deployed.running_replicas()
        except (httpx.TransportError, KeyError):  # no server, or one that starts
            return []
        return [
            (name, each["pid"])
            for name, found in replicas.items()
            for each in found
            if name.startswith("pydoc-") and (not models or name in models)
            if is_alive(each["pid"])
        ]
