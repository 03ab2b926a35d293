"""Builds the API that a configuration names, and asks the server for its model if none is named."""

import asyncio
from typing import Final

import aiohttp
from pydantic_core import from_json
from yarl import URL

from loadtest.apis.classify import Classify
from loadtest.apis.custom import Custom
from loadtest.apis.openai import OpenAiChat, OpenAiCompletions
from loadtest.apis.text_generation import TextGeneration
from loadtest.client.contract import Api, BodySettings, MalformedAnswerError
from loadtest.client.sender import MAX_WHOLE_BYTES, Target, read_text
from loadtest.client.stamped_http import StampedResponse
from loadtest.config.choices import ApiName
from loadtest.config.run_config import RunConfig

DEADLINE_S: Final = 10.0

_WITHOUT_MODEL: Final = frozenset({ApiName.CUSTOM, ApiName.TEXT_GENERATION, ApiName.CLASSIFY})
"""These servers choose the model themselves if a request names none."""


def build_api(config: RunConfig, model: str | None) -> Api:
    """Return the configured API; its requests name `model`.

    Raises:
        ValueError: A custom API's `text_path` is not a JMESPath.
    """
    settings = BodySettings(model, config.max_tokens, config.temperature)
    extra = config.body or {}
    match config.resolved_api():
        case ApiName.OPENAI_COMPLETIONS:
            return OpenAiCompletions(settings, extra)
        case ApiName.TEXT_GENERATION:
            return TextGeneration(settings, extra)
        case ApiName.CLASSIFY:
            return Classify(settings, extra)
        case ApiName.CUSTOM:
            return Custom(extra, config.text_path, config.done)
        case _:
            return OpenAiChat(settings, extra)


async def model_of(config: RunConfig, session: aiohttp.ClientSession, target: Target) -> str | None:
    """Return the model to ask for: the configured one, or else the server's first.

    Returns:
        None if requests go without a model.
    """
    if config.model is not None or config.resolved_api() in _WITHOUT_MODEL:
        return config.model
    return await first_model(session, target)


async def first_model(session: aiohttp.ClientSession, target: Target) -> str | None:
    """Return the id of the first model of `/v1/models`; None if there is none.

    An unreachable server is not reported here: each request of the run will fail and say so.
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
    """Return the URL of `/v1/models` on the server of the tested route."""
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
