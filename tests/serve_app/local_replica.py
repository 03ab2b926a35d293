"""A replica of a real model in the tests' own process, without Ray."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
from ray import serve

from deployments.contract import (
    Accepted,
    GenerationRequest,
    ModelDescription,
    TextDelta,
    TokenizedPrompt,
    TokenizeRequest,
)
from deployments.device.device import open_device
from deployments.text_generator import TextGenerator
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.deployments.replica_context import as_replica
from tests.deployments.tiny_folder import spec


class LocalStream:
    """A replica's stream without Ray."""

    def __init__(self, events: AsyncIterator[list[Any]], accepted: Accepted) -> None:
        self.num_prompt_tokens = accepted.num_prompt_tokens
        self.reasoning = accepted.reasoning
        self._events = events

    def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        return self._events

    async def aclose(self) -> None:
        await self._events.aclose()  # type: ignore[attr-defined] # a generator, as Ray has it


class LocalBackend:
    """A replica in this process."""

    def __init__(self, generator: TextGenerator) -> None:
        self._generator = generator

    async def generate(self, request: GenerationRequest) -> LocalStream:
        events = aiter(self._generator.generate(request))
        (accepted,) = await anext(events)
        assert isinstance(accepted, Accepted)
        return LocalStream(events, accepted)

    async def describe(self) -> ModelDescription:
        return await self._generator.describe()

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        return await self._generator.tokenize(request)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        return await self._generator.detokenize(token_ids)

    async def ping(self) -> None:
        await self._generator.ping()


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
    app: Any = build_app(AppParts(config, {"m": LocalBackend(generator)}))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
