"""/openapi.json is held against what is answered."""

from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

import deployments.errors
from deployments.contract import FinishReason, TextDelta, TokenLogprob, TokenLogprobs
from deployments.errors import OverloadedError, RaystreamError, ReplicaUnavailableError
from tests.serve_app.fakes import FakeBackend, Step
from tests.serve_app.sse_decoder import events_of
from tests.serve_app.test_ingress import openapi

MESSAGES = [{"role": "user", "content": "hi"}]
POSTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES, "logprobs": True},
    "/v1/completions": {"model": "m", "prompt": ["a", "b"]},
    "/text-generation": {"prompt": "hi", "stream": False},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
}
GETS = ["/v1/models", "/v1/models/{model_id}", "/health", "/ready", "/version"]
STATUSES = {
    value.status
    for value in vars(deployments.errors).values()
    if isinstance(value, type) and issubclass(value, RaystreamError)
}


async def answer_to(client: httpx.AsyncClient, path: str) -> httpx.Response:
    if path in POSTS:
        return await client.post(path, json=POSTS[path])
    return await client.get(path.format(model_id="m"))


async def response_of(client: httpx.AsyncClient, path: str, status: int) -> dict[str, Any]:
    document = await openapi(client)
    (operation,) = document["paths"][path].values()
    told: dict[str, Any] = operation["responses"][str(status)]
    return {**told, "components": document["components"]}


def validator(response: dict[str, Any]) -> Draft202012Validator:
    schema = response["content"]["application/json"]["schema"]
    return Draft202012Validator({**schema, "components": response["components"]})


async def test_every_path_is_documented_and_none_beside(client: httpx.AsyncClient) -> None:
    assert set((await openapi(client))["paths"]) == {*POSTS, *GETS}


@pytest.mark.parametrize("path", [*POSTS, *GETS])
async def test_an_answer_is_what_the_document_says(client: httpx.AsyncClient, path: str) -> None:
    answer = await answer_to(client, path)
    assert answer.status_code == 200
    told = await response_of(client, path, 200)
    validator(told).validate(answer.json())
    assert set(told["headers"]) <= {name.title() for name in answer.headers}


@pytest.mark.parametrize("path", POSTS)
async def test_every_error_that_may_come_from_behind_is_documented(
    client: httpx.AsyncClient, path: str
) -> None:
    document = await openapi(client)
    told = set(document["paths"][path]["post"]["responses"])
    assert {str(status) for status in STATUSES} <= told


@pytest.mark.parametrize("status", [400, 404, 415, 500, 503])
async def test_an_error_is_what_the_document_says(
    client: httpx.AsyncClient, backend: FakeBackend, status: int
) -> None:
    path = "/v1/completions"
    backend.refusal = {500: RaystreamError("no"), 503: OverloadedError("no")}.get(status)
    body = {"model": "x" if status == 404 else "m", "prompt": None if status == 400 else "a"}
    kind = "text/plain" if status == 415 else "application/json"
    answer = await client.post(path, json=body, headers={"content-type": kind})
    assert answer.status_code == status
    told = await response_of(client, path, status)
    validator(told).validate(answer.json())
    assert {name.lower() for name in told["headers"]} <= set(answer.headers)


@pytest.mark.parametrize("path", [*POSTS, *GETS])
async def test_nothing_is_documented_that_is_never_answered(
    client: httpx.AsyncClient, path: str
) -> None:
    document = await openapi(client)
    (operation,) = document["paths"][path].values()
    assert not {"422", "default"} & set(operation["responses"])


async def test_the_document_is_made_once(client: httpx.AsyncClient) -> None:
    assert (await openapi(client)) == (await openapi(client))


def told(token_id: int) -> TokenLogprobs:
    likely = TokenLogprob(token_id, b"a", -0.5)
    return TokenLogprobs(likely, (likely,))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/text-generation"])
async def test_every_event_is_what_the_document_says(
    client: httpx.AsyncClient, backend: FakeBackend, path: str
) -> None:
    broken: list[Step] = [
        [TextDelta((1,), "a", logprobs=(told(1),))],
        ReplicaUnavailableError("gone"),
    ]
    backend.scripts = [[*broken[:1], [TextDelta((2,), "b", FinishReason.STOP)]], broken]
    document = await openapi(client)
    response = document["paths"][path]["post"]["responses"]["200"]
    _, data = response["content"]["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
    schema = {**data["contentSchema"], "components": document["components"]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {} if path == "/text-generation" else {"stream_options": options}
    body = {**POSTS[path], **asked, "stream": True}
    if path == "/v1/completions":
        body |= {"prompt": "a", "logprobs": 1}
    whole = events_of((await client.post(path, json=body)).content)
    cut = events_of((await client.post(path, json=body)).content)
    assert whole.pop() == "[DONE]"
    assert "error" in cut[-1]
    for event in [*whole, *cut]:
        Draft202012Validator(schema).validate(event)
        name = schema["anyOf"]["error" in event]["$ref"].rpartition("/")[2]
        assert set(event) <= set(document["components"]["schemas"][name]["properties"])
