from collections.abc import AsyncIterator

import httpx2
import openai
import pytest
from fastapi import FastAPI

from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.serve_app.apps import Client, make_app
from tests.serve_app.fakes import CALL, FakeBackend, FakeClock, text_of


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def config() -> AppConfig:
    return AppConfig.model_validate(
        {
            "models": [{"id": "m", "source": "nowhere"}],
            "limits": {
                "max_body_bytes": 65536,
                "max_num_images": 2,
                "max_image_pixels": 100,
                "max_num_prompts": 8,
                "failover_timeout_s": 0.05,
            },
        }
    )


@pytest.fixture
def app(config: AppConfig, backend: FakeBackend, clock: FakeClock) -> FastAPI:
    return build_app(AppParts(config, {"m": backend}, clock=clock))


@pytest.fixture
async def client(app: FastAPI, backend: FakeBackend) -> AsyncIterator[Client]:
    async with Client(app, backend) as client:
        yield client


@pytest.fixture
async def caller() -> AsyncIterator[Client]:
    """Return a client whose model calls a tool."""
    backend = FakeBackend(text_of("Well. ", *CALL), tool_call_format="hermes")
    async with Client(make_app(backend), backend) as client:
        yield client


@pytest.fixture
async def openai_client(app: FastAPI) -> AsyncIterator[openai.AsyncOpenAI]:
    # OpenAI's client uses httpx2, which needs transports of its own.
    http_client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    async with openai.AsyncOpenAI(
        api_key="none", base_url="http://test/v1", http_client=http_client, max_retries=0
    ) as client:
        yield client
