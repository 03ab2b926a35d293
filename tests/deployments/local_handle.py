"""A handle to a replica in the tests' own process, which behaves as Ray Serve's does."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self, cast

from deployments.contract import GenerationEvent, GenerationRequest, TextDelta
from deployments.text_generator import TextGenerator
from serve_app.backends.generation import HandleGenerationBackend

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

Events = list[GenerationEvent]


class LocalResponses:
    """A streaming call: it runs whether or not its caller reads, until it is cancelled."""

    def __init__(self, events: AsyncGenerator[Events, None]) -> None:
        self._found: asyncio.Queue[Events | BaseException] = asyncio.Queue()
        self._running = asyncio.ensure_future(self._run(events))

    async def _run(self, events: AsyncGenerator[Events, None]) -> None:
        end: BaseException = StopAsyncIteration()
        try:
            async with aclosing(events):
                async for each in events:
                    self._found.put_nowait(each)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - as Ray passes it on
            end = error
        self._found.put_nowait(end)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Events:
        found = await self._found.get()
        if isinstance(found, BaseException):
            self._found.put_nowait(found)
            raise found
        return found

    def cancel(self) -> None:
        self._running.cancel()


class LocalMethod:
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def remote(self, *args: object) -> Any:
        result = self._call(*args)
        if isinstance(result, AsyncGenerator):
            return LocalResponses(result)
        return asyncio.ensure_future(result)


class LocalHandle:
    def __init__(self, replica: object) -> None:
        self._replica = replica

    def __getattr__(self, method: str) -> LocalMethod:
        return LocalMethod(getattr(self._replica, method))

    def options(self, method_name: str, stream: bool) -> LocalMethod:
        return LocalMethod(getattr(self._replica, method_name))


def local_backend(replica: object) -> HandleGenerationBackend:
    """Return the backend of a replica in this process; its deltas take a real channel."""
    return HandleGenerationBackend(cast("DeploymentHandle[Any]", LocalHandle(replica)))


async def read(generator: TextGenerator, request: GenerationRequest) -> list[TextDelta]:
    """Return the deltas of an answer, as an ingress gets them."""
    backend = local_backend(generator)
    async with aclosing(backend):
        stream = await backend.generate(request)
        async with aclosing(stream):
            return [delta async for deltas in stream for delta in deltas]
