import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.serve_app.apps import Client, client_of, make_app
from tests.serve_app.fakes import FakeBackend


async def test_models_are_asked_for_their_descriptions_when_the_application_starts(
    app: FastAPI, client: Client
) -> None:
    client.backend.loaded = asyncio.Event()
    async with asyncio.timeout(30), app.router.lifespan_context(app):
        while client.backend.num_describes == 0:  # noqa: ASYNC110 - its own task does it
            await asyncio.sleep(0)
        client.backend.loaded.set()
        assert (await client.get("/health")).status_code == 200
    assert client.backend.num_describes == 1


async def test_connections_are_closed_when_the_application_ends(config: AppConfig) -> None:
    closed: list[str] = []

    async def close() -> None:
        closed.append("here")

    app = build_app(AppParts(config, {}, on_shutdown=[close]))
    async with app.router.lifespan_context(app):
        assert not closed
    assert closed == ["here"]


async def test_an_error_while_the_application_runs_ends_what_it_started(
    config: AppConfig, backend: FakeBackend
) -> None:
    ended: list[str] = []

    async def watch() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("watch")

    async def close() -> None:
        ended.append("connections")

    app = build_app(AppParts(config, {"m": backend}, watches=[watch], on_shutdown=[close]))
    running = app.router.lifespan_context(app)
    await running.__aenter__()
    await asyncio.sleep(0)
    broken = RuntimeError("broken")
    assert not await running.__aexit__(RuntimeError, broken, None)
    assert ended == ["watch", "connections"]


async def openapi(client: httpx.AsyncClient) -> dict[str, Any]:
    document: dict[str, Any] = (await client.get("/openapi.json")).json()
    return document


@pytest.fixture(scope="module")
async def document() -> dict[str, Any]:
    async with client_of(make_app(FakeBackend())) as client:
        return await openapi(client)


def test_openapi_documents_both_forms_of_an_answer(document: dict[str, Any]) -> None:
    paths = document["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/text-generation"):
        answers = paths[path]["post"]["responses"]
        assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}


def test_openapi_documents_our_errors_and_not_fastapi_s(document: dict[str, Any]) -> None:
    assert "HTTPValidationError" not in document["components"]["schemas"]
    error = document["components"]["responses"]["Error"]
    schema = error["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/ErrorBody"}
    assert "ErrorBody" in document["components"]["schemas"]
    for path, operations in document["paths"].items():
        # The state of readiness is no error.
        others = {"503"} if path == "/ready" else set()
        for operation in operations.values():
            assert set(operation["responses"]) == {"200", "default"} | others


def test_openapi_documents_that_content_may_be_a_string(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    kinds = [kind.get("type") for kind in schemas["MessageBody"]["properties"]["content"]["anyOf"]]
    assert kinds == ["string", "array", "null"]


def test_openapi_documents_bounds(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["temperature"]["maximum"] == 2
    assert schemas["ChatRequest"]["additionalProperties"] is False
