"""An ingress in a process of its own that can be killed, and its way to a replica, without Ray.

Processes are forked from one that has imported everything, so another ingress is there at once.
"""

import asyncio
import multiprocessing
import pickle
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any
from unittest.mock import patch

import uvicorn

from deployments.contract.descriptions import ModelDescription
from deployments.contract.generation import Accepted, GenerationRequest, Request
from deployments.contract.output import TextDelta
from deployments.generator_replica import GeneratorReplica
from serve_app.backends.replicas.backend import DescribeRequest
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from serve_app.jobs import leases
from tests.deployments.local_handle import local_backend
from tests.raw_http import LOCALHOST

LEASE_S = 4.0
"""How long the jobs of a killed ingress wait for another one, instead of a quarter of a minute.

Leases are renewed every second. One that runs out on a busy machine moves its job, as a death does.
"""


@cache
def context() -> ForkServerContext:
    """Return what starts processes that have imported this module.

    A process has one such server, and another test may have started it: each ingress would then
    import everything for itself, which takes seconds.
    """
    # Its own method for tests; it does nothing if none runs.
    forkserver._forkserver._stop()  # type: ignore[attr-defined] # typeshed lacks it
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([__name__])
    return found


class Ingress:
    """One ingress."""

    def __init__(
        self,
        processes: ForkServerContext,
        description: ModelDescription,
        replica_port: int,
        jobs: str | None = None,
    ) -> None:
        """Start it.

        Args:
            processes: Starts processes.
            description: Of the replica's model.
            replica_port: That of `listening_replica`.
            jobs: The folder of files and batches; None keeps none.
        """
        listener = socket.create_server((LOCALHOST, 0))
        # Where it listens, from the start: connections wait until it answers.
        self.url = f"http://{LOCALHOST}:{listener.getsockname()[1]}"
        self._process = processes.Process(
            target=_serve, args=(listener, description, replica_port, jobs), daemon=True
        )
        self._process.start()
        listener.close()

    def kill(self) -> None:
        """End it at once, and wait until its connections are reset."""
        self._process.kill()
        self._process.join()


def _serve(
    listener: socket.socket, description: ModelDescription, replica_port: int, jobs: str | None
) -> None:
    """Answer requests until the process is killed."""
    models = [{"id": description.id, "source": "nowhere"}]
    config = AppConfig.model_validate({"models": models, "jobs": {"folder": jobs}})
    backend = _RemoteBackend(description, replica_port)
    app = build_app(AppParts(config, {description.id: backend}))
    server = uvicorn.Server(uvicorn.Config(app, access_log=False, log_level="error"))
    with patch.object(leases, "LEASE_S", LEASE_S):
        server.run(sockets=[listener])


class _RemoteBackend:
    """A replica in another process."""

    def __init__(self, description: ModelDescription, port: int) -> None:
        self._description = description
        self._port = port

    async def send(self, request: Request[Any]) -> Any:
        if isinstance(request, DescribeRequest):
            return self._description
        assert isinstance(request, GenerationRequest), "it gets no others"
        reader, writer = await asyncio.open_connection(LOCALHOST, self._port)
        _write(writer, request)
        return _RemoteStream(reader, writer, await _read(reader))


class _RemoteStream:
    """A stream whose deltas come over a connection of its own."""

    waited_until_s = 0.0

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, accepted: Accepted
    ) -> None:
        self.accepted = accepted
        self._reader, self._writer = reader, writer

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        while (deltas := await _read(self._reader)) is not None:
            yield deltas

    async def aclose(self) -> None:
        self._writer.close()


@asynccontextmanager
async def listening_replica(
    generator: GeneratorReplica, flows: asyncio.Event | None = None
) -> AsyncIterator[int]:
    """Answer the requests of ingresses in other processes; yield the port.

    Args:
        generator: The replica.
        flows: While it is not set, no stream goes on; without it, all always do.
    """
    async with aclosing(local_backend(generator)) as backend:

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):  # the ingress is dead, and the stream is closed
                await send(reader, writer)

        async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stream = await backend.send(await _read(reader))
            async with aclosing(stream):
                _write(writer, stream.accepted)
                async for deltas in stream:
                    if flows is not None:
                        await flows.wait()
                    _write(writer, deltas)
                    await writer.drain()
                _write(writer, None)
            writer.close()

        async with await asyncio.start_server(answer, LOCALHOST, 0) as server:
            yield server.sockets[0].getsockname()[1]


def _write(writer: asyncio.StreamWriter, value: object) -> None:
    data = pickle.dumps(value)
    writer.write(len(data).to_bytes(4) + data)


async def _read(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(4))
    return pickle.loads(await reader.readexactly(size))
