"""A server with fragile replicas, and its clients."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.faults.served.replicas import DEADLINE_S, FOLDER, Replicas
from tests.ray.serve_run import SERVE_RUN, Server, haproxy_environment, serving


@contextmanager
def fragile_server(folder: Path, document: dict[str, Any]) -> Iterator[Server]:
    """Start a server as `make serve` does, whose replicas write to a folder, and stop it."""
    Replicas.watched_in(folder)
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(document))
    environment = {**os.environ, "HOME": str(folder), FOLDER: str(folder)}
    environment |= haproxy_environment()
    with serving(Server(path, folder / "serve.log", environment, SERVE_RUN)) as server:
        yield server


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client that opens a connection for each request."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S, limits=limits) as client:
        yield client
