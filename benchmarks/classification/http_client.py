"""Sends texts to a server and checks only that it has answered."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from benchmarks.classification.load import Send

Body = Mapping[str, object]


@asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session that allows one connection per user."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        yield client


def sender(client: aiohttp.ClientSession, url: str, body: Callable[[int], Body]) -> Send:
    """Return a function that posts the body for a number and raises unless the status is 200."""

    async def send(number: int) -> None:
        async with client.post(url, json=body(number)) as response:
            answer = await response.read()
            if response.status != 200:
                raise RuntimeError(f"{url} answered {response.status}: {answer[:200]!r}")

    return send


async def fetch(client: aiohttp.ClientSession, url: str) -> Any:
    """Return a URL's JSON."""
    async with client.get(url, raise_for_status=True) as response:
        return await response.json()
