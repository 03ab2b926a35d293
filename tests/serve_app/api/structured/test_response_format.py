"""`response_format` over HTTP: what reaches the replica, and what is refused."""

from typing import Any

import pytest

from serve_app.api.structured import answer_grammar
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.offenders import for_each
from tests.serve_app.apps import Client, client_of
from tests.serve_app.fakes import FakeBackend

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


def named(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


@pytest.mark.parametrize("strict", [{}, {"strict": True}, {"strict": False}, {"strict": None}])
async def test_a_schema_is_enforced_whether_strict_or_not(
    client: Client, strict: dict[str, Any]
) -> None:
    answer = await client.ask(CHAT, {**HI, "response_format": named(SCHEMA, **strict)})
    grammar = client.backend.requests[0].sampling.grammar
    assert grammar is not None
    assert '"properties": {"a": {"type": "integer"}}' in grammar
    assert "x-raystream-warning" not in answer.headers


async def test_every_answer_of_several_follows_the_grammar(client: Client) -> None:
    body = {**HI, "n": 3, "response_format": {"type": "json_object"}}
    assert (await client.post(CHAT, json=body)).status_code == 200
    grammars = {request.sampling.grammar for request in client.backend.requests}
    assert len(client.backend.requests) == 3
    assert len(grammars) == 1
    assert None not in grammars


async def test_the_plain_surface_takes_it_too(client: Client) -> None:
    body = {"prompt": "Hi", "stream": False, "response_format": {"type": "json_object"}}
    assert (await client.post("/text-generation", json=body)).status_code == 200
    assert client.backend.requests[0].sampling.grammar is not None


@pytest.mark.parametrize("response_format", [None, {"type": "text"}])
async def test_plain_text_has_no_grammar(client: Client, response_format: Any) -> None:
    await client.post(CHAT, json={**HI, "response_format": response_format})
    assert client.backend.requests[0].sampling.grammar is None


@for_each(
    {},
    "json_object",
    {"type": "xml"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "x"}},
    {"type": "json_schema", "json_schema": {"schema": {}}},
    {"type": "json_object", "json_schema": {}},
    named(SCHEMA, other=1),
    named(True),
    named({"not": {}}, strict=True),
    named({"$ref": "#"}),
)
async def test_an_invalid_response_format_is_refused_by_the_field_s_name(
    response_format: Any, client: Client
) -> None:
    error = await client.refused(CHAT, {**HI, "response_format": response_format})
    assert error["param"].startswith("response_format")
    assert error["message"]
    assert not client.backend.requests


async def test_the_document_names_the_field_schema(client: Client) -> None:
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    assert set(schemas["NamedSchema"]["required"]) == {"name", "schema"}


async def test_a_schema_is_refused_at_once_if_too_many_are_queued(
    config: AppConfig, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_grammar, "MAX_NUM_SCHEMAS", 0)
    async with client_of(build_app(AppParts(config, {"m": backend}))) as client:
        refused = await client.post(CHAT, json={**HI, "response_format": named(SCHEMA)})
        assert (await client.post(CHAT, json=HI)).status_code == 200
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "overloaded"
    assert refused.headers["retry-after"] == "1"
    assert len(backend.requests) == 1
