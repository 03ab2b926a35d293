"""Kills one replica of the demo's server, and none of another server."""

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any, Final

import psutil

from serve_app.client.chat_client import ChatClient
from serve_app.commands.user.demo.screens import DemoScreen
from serve_app.commands.user.demo.server import DemoError, DemoServer
from serve_app.commands.user.demo.streams import DemoStream

POLL_S: Final = 0.02


async def kill_busiest(
    server: DemoServer, client: ChatClient, streams: Sequence[DemoStream], screen: DemoScreen
) -> None:
    """Kill the replica that runs the most streams, once all of them are well under way.

    Raises:
        DemoError: The streams were faster.
    """
    await asyncio.gather(*(stream.under_way.wait() for stream in streams))
    while (replica := await _busiest(client)) is None:
        if all(stream.finish_reason for stream in streams):
            raise DemoError("the streams ended before a replica could be killed")
        await asyncio.sleep(POLL_S)
    kill_replica(server, replica["process_id"])
    num, name = replica["work"]["num_running"], replica["replica_id"]
    screen.tell(
        f"Replica {name} killed (pid {replica['process_id']}) with {num} of the 3 streams.",
        "bold red",
    )


async def _busiest(client: ChatClient) -> dict[str, Any] | None:
    """Return what `/v1/devices` tells of the replica that runs the most sequences, if any runs."""
    (model,) = (await client.get("/devices"))["data"]
    replicas = [each for each in model["replicas"] if each["work"]["num_running"]]
    return max(replicas, key=lambda each: int(each["work"]["num_running"]), default=None)


def kill_replica(server: DemoServer, process_id: int) -> None:
    """Kill a replica as the system does that runs out of memory.

    Raises:
        DemoError: The process is none of this server's.
    """
    family = psutil.Process(server.process.pid).children(recursive=True)
    if process_id not in {each.pid for each in family}:
        raise DemoError(f"the process {process_id} does not belong to the demo's server")
    os.kill(process_id, signal.SIGKILL)
