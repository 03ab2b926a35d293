"""A handle to a replica in this process, which behaves as Ray Serve's does."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Self

Events = list[Any]
"""What a replica yields at once."""


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
        """Return itself."""
        return self

    async def __anext__(self) -> Events:
        """Return what the replica yielded next."""
        found = await self._found.get()
        if isinstance(found, BaseException):
            self._found.put_nowait(found)
            raise found
        return found

    def cancel(self) -> None:
        """Ask the replica to stop."""
        self._running.cancel()


class LocalMethod:
    """A method of the replica."""

    def __init__(self, replica: object, name: str) -> None:
        self._replica = replica
        self._name = name

    def remote(self, *args: object) -> Any:
        """Call it; see `DeploymentHandle`."""
        result = getattr(self._replica, self._name)(*args)
        if isinstance(result, AsyncGenerator):
            return LocalResponses(result)
        return asyncio.ensure_future(result)


class LocalHandle:
    """The part of Ray's `DeploymentHandle` that backends use."""

    def __init__(self, replica: object) -> None:
        self._replica = replica

    def __getattr__(self, method: str) -> LocalMethod:
        """Return a method of the replica."""
        return LocalMethod(self._replica, method)

    def options(self, method_name: str, stream: bool) -> LocalMethod:
        """Return a method of the replica; whether it streams, its result shows."""
        return LocalMethod(self._replica, method_name)
