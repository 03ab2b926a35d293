"""Builders of the application, of keys and of requests; a reader of the access log."""

import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from serve_app import ingress
from serve_app.backends.key_ledger import Ledger
from serve_app.backends.replicas.backend import Backend
from serve_app.config import ApiKey, AppConfig
from serve_app.images.fetcher import ImageSource
from serve_app.ingress import AppParts, build_app
from serve_app.keys.api_keys import KeyRing, hash_key
from tests.serve_app.fakes import FakeBackend, FakeClock

CHAT = "/v1/chat/completions"
ALICE, BOB = "sk-of-alice-0000000", "sk-of-bob-000000000"
JSON = {"content-type": "application/json"}


class AppClient(httpx.AsyncClient):
    """Asks an application in the tests' own process; a bug of the application is raised here."""

    def __init__(self, app: FastAPI) -> None:
        self._asgi = httpx.ASGITransport(app)
        super().__init__(transport=self._asgi, base_url="http://test")

    async def ask(
        self, path: str, body: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """Post a body, and check the status of the answer; 500 is what a bug is answered with."""
        self._asgi.raise_app_exceptions = status != 500
        answer = await self.post(path, json=body, headers=headers)
        self._asgi.raise_app_exceptions = True
        assert answer.status_code == status, answer.text
        return answer

    async def refused(
        self, path: str, body: object, status: int = 400, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Post a body that is refused; check the status, and return the error."""
        error: dict[str, Any] = (await self.ask(path, body, status, headers)).json()["error"]
        return error


class Client(AppClient):
    """A client of an application that serves a fake as model `m`."""

    def __init__(self, app: FastAPI, backend: FakeBackend) -> None:
        """Keep the fake, whose answers a test sets and whose requests it sees."""
        super().__init__(app)
        self.backend = backend


def key(name: str, secret: str, **limits: float) -> ApiKey:
    return ApiKey.model_validate({"name": name, "sha256": hash_key(secret), **limits})


def ring(**limits: int) -> KeyRing:
    """Return Alice's key with these limits, and Bob's without any."""
    return KeyRing((key("alice", ALICE, **limits), key("bob", BOB)))


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def question(**fields: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hello?"}], **fields}


def make_app(
    backend: FakeBackend,
    keys: KeyRing | None = None,
    ledger: Ledger | None = None,
    limits: Mapping[str, object] | None = None,
    images: ImageSource | None = None,
    classifier: Backend | None = None,
    embedder: Backend | None = None,
    cross_encoder: Backend | None = None,
    auth: Mapping[str, object] | None = None,
    jobs: Mapping[str, object] | None = None,
    clock: FakeClock | None = None,
) -> FastAPI:
    config = AppConfig.model_validate(
        {
            "models": [{"id": "m", "source": "nowhere"}],
            "limits": dict(limits or {}),
            "auth": dict(auth or {}),
            "jobs": dict(jobs or {}),
        }
    )
    return build_app(
        AppParts(
            config,
            {"m": backend},
            clock=clock or FakeClock(),
            keys=keys,
            ledger=ledger,
            images=images,
            classifiers={
                id_: each for id_, each in (("c", classifier), ("x", cross_encoder)) if each
            },
            embedders={} if embedder is None else {"e": embedder},
        )
    )


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[AppClient]:
    async with AppClient(app) as client:
        yield client


@asynccontextmanager
async def keeping(app: FastAPI) -> AsyncIterator[AppClient]:
    """Ask an application that keeps jobs and runs none; close its database at the end.

    FastAPI's caches keep an application long after its test.
    """
    async with AsyncExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ingress, "_runners", lambda *parts: ())
            await stack.enter_async_context(app.router.lifespan_context(app))
        yield await stack.enter_async_context(client_of(app))


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    records = [r for r in caplog.records if r.name == "ray.serve.raystream.access"]
    assert all(record.levelno == logging.INFO for record in records)
    return [json.loads(record.getMessage()) for record in records]
