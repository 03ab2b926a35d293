"""Compares bodies with the types of openai and anthropic, to notice fields that they add."""

import re
from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError

from serve_app.api.body.strict_body import StrictBody
from serve_app.api.body.unsupported_fields import BODIES, UNSUPPORTED
from serve_app.api.chat.schema import ChatRequest
from serve_app.api.completions.schema import CompletionRequest
from serve_app.api.messages.schema import MessagesRequest, PromptFields
from serve_app.api.responses.schema import ResponsesRequest
from tests.offenders import every, for_each
from tests.serve_app.apps import Client

SURFACES: dict[str, tuple[type[StrictBody], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "hi"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "hi"}),
    "/v1/responses": (ResponsesRequest, {"input": "hi"}),
}
ANTHROPIC: dict[str, tuple[type[StrictBody], dict[str, Any]]] = {
    "/v1/messages": (
        MessagesRequest,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    ),
    "/v1/messages/count_tokens": (PromptFields, {"messages": [{"role": "user", "content": "hi"}]}),
}


def refused_by(
    surfaces: dict[str, tuple[type[StrictBody], dict[str, Any]]],
) -> list[tuple[str, str]]:
    """Return each path with each field that it refuses."""
    return [
        (path, name) for path, (body, _) in surfaces.items() for name in sorted(body.unsupported)
    ]


def test_every_field_of_both_apis_is_honoured_or_refused_with_a_reason() -> None:
    from tests.serve_app.api.body.client_types import FIELDS

    for case in every(FIELDS):
        with case as (body, field):
            not_honoured = {*body.unsupported, *body.echoed}
            if field in body.model_fields:
                assert field not in not_honoured
            else:
                assert field in not_honoured
                assert (body.unsupported.get(field) or UNSUPPORTED[field]).why


@for_each(*refused_by(SURFACES))
async def test_an_unsupported_field_is_refused_by_name_unless_it_asks_for_nothing(
    path: str, field: str, client: Client
) -> None:
    body = {"model": "m", **SURFACES[path][1]}
    error = await client.refused(path, {**body, field: {"ask": "for something"}})
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    harmless = SURFACES[path][0].unsupported[field].harmless
    for value in (None, *harmless):
        assert (await client.post(path, json={**body, field: value})).status_code == 200


@for_each(*refused_by(ANTHROPIC))
async def test_an_unsupported_field_of_anthropic_is_refused_by_name(
    path: str, field: str, client: Client
) -> None:
    kind, needed = ANTHROPIC[path]
    body = {"model": "m", **needed}
    error = await client.refused(path, {**body, field: {"ask": "for something"}})
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{field} is not supported here: ")
    for value in (None, *kind.unsupported[field].harmless):
        assert (await client.post(path, json={**body, field: value})).status_code == 200


@for_each(
    ("/v1/completions", "messages", "/v1/chat/completions"),
    ("/v1/chat/completions", "prompt", "/v1/completions"),
    ("/v1/completions", "input", "/v1/classify"),
    ("/v1/chat/completions", "input", "/v1/classify"),
)
async def test_a_field_of_another_route_is_refused_with_the_name_of_that_route(
    path: str, field: str, route: str, client: Client
) -> None:
    body = {"model": "m", field: "hi" if field != "messages" else [{"role": "user"}]}
    error = (await client.post(path, json=body)).json()["error"]
    assert error["param"] == field
    assert f"POST {route}" in error["message"]


def bodies_below(body: type[StrictBody]) -> set[type[StrictBody]]:
    found = {body}
    for below in body.__subclasses__():
        found |= bodies_below(below)
    return found


@for_each(*sorted(bodies_below(StrictBody), key=str))
def test_the_hint_for_an_unknown_field_names_no_field_that_is_refused(
    body: type[StrictBody],
) -> None:
    honoured = {field.alias or name for name, field in body.model_fields.items()}
    known = {*honoured, *body.unsupported, *body.echoed}
    for misspelt in {name[:-1] for name in known} | {f"{name}s" for name in known}:
        if misspelt in known:
            continue
        with pytest.raises(ValidationError) as caught:
            body.model_validate({misspelt: 1})
        hint = re.search(r"Did you mean '(\w+)'", caught.value.errors()[0]["msg"])
        assert hint is None or hint[1] in honoured


def test_each_row_of_the_table_is_of_one_body() -> None:
    names = Counter(body.__name__ for body in bodies_below(StrictBody))
    assert {name: names[name] for name in BODIES} == dict.fromkeys(BODIES, 1)
    known = {f"{body}.{field}" for body, fields in BODIES.items() for field in fields.split()}
    assert {row for row in UNSUPPORTED if "." in row} <= known
