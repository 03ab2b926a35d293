"""/openapi.json is held against what is answered."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator

import deployments.errors
from deployments.contract import FinishReason, TextDelta, TokenLogprob, TokenLogprobs
from deployments.errors import OverloadedError, RaystreamError, ReplicaUnavailableError
from serve_app.config import AppConfig
from serve_app.ingress import build_app
from tests.serve_app.fake_classifier import FakeClassifier
from tests.serve_app.fakes import FakeBackend, FakeClock, Step
from tests.serve_app.sse_decoder import events_of
from tests.serve_app.test_ingress import openapi

MESSAGES = [{"role": "user", "content": "hi"}]
POSTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES, "logprobs": True},
    "/v1/completions": {"model": "m", "prompt": ["a", "b"]},
    "/text-generation": {"prompt": "hi", "stream": False},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
    "/v1/classify": {"model": "c", "input": ["a", "b"], "split": {}},
    "/classify": {"model": "c", "input": "a"},
}
GETS = ["/v1/models", "/v1/models/{model_id}", "/health", "/ready", "/version"]
STATUSES = {
    value.status
    for value in vars(deployments.errors).values()
    if isinstance(value, type) and issubclass(value, RaystreamError)
}


@pytest.fixture
def app(config: AppConfig, backend: FakeBackend, clock: FakeClock) -> FastAPI:
    return build_app(config, {"m": backend}, clock, classifiers={"c": FakeClassifier()})


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


async def test_a_body_names_the_models_of_its_task(client: httpx.AsyncClient) -> None:
    schemas = (await openapi(client))["components"]["schemas"]
    for body in ("ClassifyBody", "VllmClassifyBody"):
        kinds = schemas[body]["properties"]["model"]["anyOf"]
        assert [kind.get("enum") for kind in kinds] == [["c"], None]
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == ["m"]


async def test_the_document_is_made_once(client: httpx.AsyncClient) -> None:
    assert (await openapi(client)) == (await openapi(client))


def event_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    response = document["paths"][path]["post"]["responses"]["200"]
    _, data = response["content"]["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
    return {**data["contentSchema"], "components": document["components"]}


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
    schema = event_schema(document, path)
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


async def test_calls_of_tools_are_what_the_document_says(config: AppConfig) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    steps: list[Step] = [[TextDelta((1,), text, FinishReason.STOP)]]
    backend = FakeBackend(steps, tool_call_format="hermes")
    transport = httpx.ASGITransport(build_app(config, {"m": backend}))
    path = "/v1/chat/completions"
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"model": "m", "messages": MESSAGES, "tools": tools}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        document = await openapi(client)
        whole = (await client.post(path, json=body)).json()
        streamed = events_of((await client.post(path, json={**body, "stream": True})).content)
        validator(await response_of(client, path, 200)).validate(whole)
    schemas = document["components"]["schemas"]
    message = whole["choices"][0]["message"]
    assert message["tool_calls"]
    assert set(message) == set(schemas["AnswerMessage"]["properties"])
    for event in streamed[:-1]:
        Draft202012Validator(event_schema(document, path)).validate(event)
        (choice,) = event["choices"]
        assert set(choice["delta"]) <= set(schemas["ChatDelta"]["properties"])
        for call in choice["delta"].get("tool_calls", ()):
            assert set(call) <= set(schemas["ToolCallDelta"]["properties"])
    assert choice["finish_reason"] == "tool_calls"
