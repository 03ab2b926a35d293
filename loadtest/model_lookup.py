"""Asks an OpenAI-like server which model it serves, for runs that name none."""

import asyncio
from typing import Final

import aiohttp
from pydantic_core import from_json
from yarl import URL

from loadtest.apis.contract import MalformedAnswerError
from loadtest.sender import MAX_WHOLE_BYTES, Target, read_text
from loadtest.stamped_http import StampedResponse

DEADLINE_S: Final = 10.0


async def first_model(session: aiohttp.ClientSession, target: Target) -> str | None:
    """Return the id of the first model of `/v1/models`; None if the server does not tell.

    A server that can't be reached says nothing here: the run will, with each of its requests.
    """
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            session.get(
                models_url(target.url), headers=target.headers, allow_redirects=False
            ) as response,
        ):
            assert isinstance(response, StampedResponse)
            listed = await read_text(response.body_reads, MAX_WHOLE_BYTES)
    except (TimeoutError, aiohttp.ClientError, OSError, MalformedAnswerError):
        return None
    return _first_id(listed)


def models_url(url: URL) -> URL:
    """Return where the models are listed, beside the route that is aimed at."""
    head, found, _ = url.path.partition("/v1/")
    return url.with_path(f"{head}/v1/models" if found else "/v1/models").with_query(None)


def _first_id(body: str) -> str | None:
    try:
        listed = from_json(body)
    except ValueError:
        return None
    data = listed.get("data") if isinstance(listed, dict) else None
    first = data[0] if isinstance(data, list) and data else None
    name = first.get("id") if isinstance(first, dict) else None
    return name if isinstance(name, str) else None
