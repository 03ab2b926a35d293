"""A replica of a real model in the tests' own process, without Ray."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
from ray import serve

from deployments.device.device import open_device
from deployments.text_generator import TextGenerator
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.deployments.local_handle import local_backend
from tests.deployments.replica_context import as_replica
from tests.deployments.tiny_folder import spec

KEPT: list[type[TextGenerator]] = []
"""Classes with queues: a queue that is garbage-collected makes an event loop and leaves it open."""


@contextmanager
def local_generator(folder: Path, **changes: object) -> Iterator[TextGenerator]:
    """Make a replica of the model in a folder, named `m`.

    Args:
        folder: The model's files.
        changes: What differs from the spec of a small replica.
    """

    # Serve keeps one queue for each decorated method, on the event loop that used it first. Tests
    # of another module, on another loop, would wait for it forever.
    class OwnQueue(TextGenerator):
        _encode: Any = serve.batch(cast("Any", TextGenerator._encode).__wrapped__)

    KEPT.append(OwnQueue)
    with as_replica("m"):
        # Ray may be running for other tests, but it has assigned no GPU to this process.
        made = OwnQueue(
            spec(folder, id="m", **changes),
            open_device=lambda spec: open_device(spec.device, has_gpu=False),
        )
        try:
            yield made
        finally:
            made.__del__()


@asynccontextmanager
async def local_client(
    generator: TextGenerator, config: AppConfig
) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client of the application that this replica serves as `m`."""
    backend = local_backend(generator)
    app: Any = build_app(AppParts(config, {"m": backend}))
    transport = httpx.ASGITransport(app)
    async with (
        aclosing(backend),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client
