"""Compares /openapi.json with what the server answers, and tests the page `/docs`."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator

import deployments.contract.errors
from deployments.contract.errors import GenerationFailedError, OverloadedError, RaystreamError
from deployments.contract.output import FinishReason, TextDelta, TokenLogprob, TokenLogprobs
from serve_app.config import AppConfig
from serve_app.http.warning_header import WARNING_HEADER
from serve_app.ingress import AppParts, build_app
from tests.offenders import for_each
from tests.serve_app.apps import Client, client_of, make_app
from tests.serve_app.fake_pooler import FakeClassifier, FakeCrossEncoder, FakeEmbedder
from tests.serve_app.fakes import FakeBackend, FakeClock, Step
from tests.serve_app.sse_decoder import events_of
from tests.serve_app.test_ingress import openapi

MESSAGES = [{"role": "user", "content": "hi"}]
POSTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES, "logprobs": True},
    "/v1/completions": {"model": "m", "prompt": ["a", "b"]},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 9},
    "/v1/messages/count_tokens": {"model": "m", "messages": MESSAGES},
    "/text-generation": {"prompt": "hi", "stream": False},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
    "/v1/classify": {"model": "c", "input": ["a", "b"], "split": {}},
    "/classify": {"model": "c", "input": "a"},
    "/v1/embeddings": {"model": "e", "input": ["a", "b"]},
    "/rerank": {"model": "e", "query": "a", "documents": ["a", {"text": "b"}]},
    "/v1/rerank": {"query": "a", "documents": ["b"], "return_documents": False},
    "/v2/rerank": {"query": "a", "documents": ["b"], "top_n": 1},
    "/score": {"model": "e", "text_1": "a", "text_2": ["a", "b"]},
    "/v1/score": {"text_1": ["a", "b"], "text_2": ["a", "b"]},
}
GETS = [
    "/v1/models",
    "/v1/models/{model_id}",
    "/v1/devices",
    "/health",
    "/live",
    "/ready",
    "/version",
]
ACTIONS = [f"/v1/models/{{model_id}}/{action}" for action in ("wake", "sleep", "pin", "unpin")]
"""POST routes without a body."""
JOBS = {
    "/v1/files": ["get", "post"],
    "/v1/files/{file_id}": ["delete", "get"],
    "/v1/files/{file_id}/content": ["get"],
    "/v1/batches": ["get", "post"],
    "/v1/batches/{batch_id}": ["get"],
    "/v1/batches/{batch_id}/cancel": ["post"],
    "/v1/responses/{response_id}": ["delete", "get"],
    "/v1/responses/{response_id}/cancel": ["post"],
    "/v1/responses/{response_id}/input_items": ["get"],
}
"""The methods of each path that this server, without a folder for jobs, refuses."""
NOT_JSON = {"/metrics": "text/plain"}
STATUSES = {
    value.status
    for value in vars(deployments.contract.errors).values()
    if isinstance(value, type) and issubclass(value, RaystreamError)
}


def app_of(backend: FakeBackend) -> FastAPI:
    return build_app(
        AppParts(
            AppConfig.model_validate({"models": [{"id": "m", "source": "nowhere"}]}),
            {"m": backend},
            clock=FakeClock(),
            classifiers={"c": FakeClassifier()},
            embedders={"e": FakeEmbedder()},
            host="127.0.0.1",
        )
    )


@pytest.fixture
def app(backend: FakeBackend) -> FastAPI:
    return app_of(backend)


@pytest.fixture(scope="module")
async def document() -> dict[str, Any]:
    async with client_of(app_of(FakeBackend())) as client:
        return await openapi(client)


async def answer_to(client: httpx.AsyncClient, path: str) -> httpx.Response:
    if path in POSTS:
        return await client.post(path, json=POSTS[path])
    return await client.get(path.format(model_id="m"))


def response_of(document: dict[str, Any], path: str, status: int) -> dict[str, Any]:
    (operation,) = document["paths"][path].values()
    responses = operation["responses"]
    assert set(responses) - {"503"} == {"200", "default"}
    if status == 200:
        return {**responses["200"], "components": document["components"]}
    name = "RerankError" if path == "/v2/rerank" else "Error"
    assert responses["default"] == {"$ref": f"#/components/responses/{name}"}
    return {**document["components"]["responses"][name], "components": document["components"]}


def validator(response: dict[str, Any]) -> Draft202012Validator:
    schema = response["content"]["application/json"]["schema"]
    return Draft202012Validator({**schema, "components": response["components"]})


def test_exactly_the_served_paths_are_documented(document: dict[str, Any]) -> None:
    assert set(document["paths"]) == {*POSTS, *GETS, *ACTIONS, *NOT_JSON, *JOBS}
    assert {path: sorted(document["paths"][path]) for path in JOBS} == JOBS


@pytest.mark.parametrize(("path", "content_type"), NOT_JSON.items())
def test_what_is_not_json_is_documented_as_what_it_is(
    document: dict[str, Any], path: str, content_type: str
) -> None:
    content = document["paths"][path]["get"]["responses"]["200"]["content"]
    assert [each.partition(";")[0] for each in content] == [content_type]


@for_each(*POSTS, *GETS)
async def test_an_answer_is_what_the_document_says(
    path: str, client: Client, document: dict[str, Any]
) -> None:
    answer = await answer_to(client, path)
    assert answer.status_code == 200
    told = response_of(document, path, 200)
    validator(told).validate(answer.json())
    always = set(told["headers"]) - {WARNING_HEADER}
    assert always <= {name.title() for name in answer.headers}


def test_every_error_of_the_deployments_is_documented(document: dict[str, Any]) -> None:
    description = document["components"]["responses"]["Error"]["description"]
    told = {int(status) for status in re.findall(r"^- \*\*(\d+)\*\*: ", description, re.MULTILINE)}
    assert told >= STATUSES
    assert told - STATUSES == {405}  # the router's own


@pytest.mark.parametrize("status", [400, 404, 415, 500, 503])
async def test_an_error_is_what_the_document_says(
    client: Client, document: dict[str, Any], status: int
) -> None:
    path = "/v1/completions"
    client.backend.refusal = {500: RaystreamError("no"), 503: OverloadedError("no")}.get(status)
    body = {"model": "x" if status == 404 else "m", "prompt": None if status == 400 else "a"}
    kind = "text/plain" if status == 415 else "application/json"
    answer = await client.post(path, json=body, headers={"content-type": kind})
    assert answer.status_code == status
    told = response_of(document, path, status)
    validator(told).validate(answer.json())
    hints = {"retry-after", "x-should-retry"} & set(answer.headers)
    assert hints <= {name.lower() for name in told["headers"]}
    assert hints == {500: set(), 503: {"retry-after"}}.get(status, {"x-should-retry"})


def examples(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return each path with each of its example bodies."""
    return [
        (path, example["value"])
        for path, operations in document["paths"].items()
        if "post" in operations and path not in JOBS and path not in ACTIONS
        for example in operations["post"]["requestBody"]["content"]["application/json"][
            "examples"
        ].values()
    ]


async def test_every_example_succeeds_as_it_stands(
    client: Client, document: dict[str, Any]
) -> None:
    found = examples(document)
    assert {path for path, _ in found} == set(POSTS)
    for path, body in found:
        answer = await client.ask(path, body)
        is_stream = answer.headers["content-type"].startswith("text/event-stream")
        assert is_stream == body.get("stream", path == "/text-generation")


def test_every_example_is_valid_by_the_schema_of_its_body(document: dict[str, Any]) -> None:
    for path, body in examples(document):
        told = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        schema = {**told["schema"], "components": document["components"]}
        Draft202012Validator(schema).validate(body)


def test_the_first_example_of_an_answer_in_text_streams(document: dict[str, Any]) -> None:
    first: dict[str, dict[str, Any]] = {}
    for path, body in examples(document):
        first.setdefault(path, body)
    for path in ("/v1/chat/completions", "/v1/completions", "/text-generation"):
        assert first[path].get("stream", path == "/text-generation")


async def test_what_is_shown_of_files_and_batches_is_what_the_document_says(
    backend: FakeBackend, tmp_path: Path, document: dict[str, Any]
) -> None:
    app = make_app(backend, jobs={"folder": str(tmp_path / "jobs")})
    async with client_of(app) as client:
        file = await client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"{}")}
        )
        body = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions"}
        batch = await client.post("/v1/batches", json={**body, "completion_window": "1h"})
        for path, method, answer in (
            ("/v1/files", "post", file),
            ("/v1/files", "get", await client.get("/v1/files")),
            ("/v1/files/{file_id}", "get", await client.get(f"/v1/files/{file.json()['id']}")),
            ("/v1/batches", "post", batch),
            ("/v1/batches", "get", await client.get("/v1/batches")),
        ):
            assert answer.status_code == 200, answer.text
            told = document["paths"][path][method]["responses"]["200"]
            validator({**told, "components": document["components"]}).validate(answer.json())


async def test_a_parameter_of_a_path_has_a_served_model_as_its_example(
    client: Client, document: dict[str, Any]
) -> None:
    (parameter,) = document["paths"]["/v1/models/{model_id}"]["get"]["parameters"]
    answer = await client.get(f"/v1/models/{parameter['example']}")
    assert answer.json()["id"] == "m"


@pytest.mark.slow
async def test_what_no_served_model_can_answer_is_left_out(
    config: AppConfig, backend: FakeBackend
) -> None:
    classifying = build_app(AppParts(config, {}, classifiers={"c": FakeClassifier()}))
    generating = build_app(AppParts(config, {"m": backend}))
    embedding = build_app(AppParts(config, {}, embedders={"e": FakeEmbedder()}))
    classify = {"/v1/classify", "/classify"}
    embed = {"/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"}
    others = {*GETS, *ACTIONS, *NOT_JSON, *JOBS}
    assert set(classifying.openapi()["paths"]) == {*classify, *others}
    assert set(embedding.openapi()["paths"]) == {*embed, *others}
    assert set(generating.openapi()["paths"]) == {*POSTS, *others} - classify - embed


async def test_a_cross_encoder_is_documented_once_it_is_known(config: AppConfig) -> None:
    app = build_app(AppParts(config, {}, classifiers={"x": FakeCrossEncoder()}))
    async with client_of(app) as client:
        assert "/rerank" not in (await openapi(client))["paths"]
        await client.ask("/rerank", {"query": "a", "documents": ["a"]})
        schemas = (await openapi(client))["components"]["schemas"]
    kinds = schemas["RerankBody"]["properties"]["model"]["anyOf"]
    assert [kind.get("enum") for kind in kinds] == [["x"], None]


def test_every_reference_in_the_document_leads_somewhere(document: dict[str, Any]) -> None:
    references = set(re.findall(r'"\$ref": ?"#/([^"]+)"', json.dumps(document)))
    assert {"components/responses/Error", "components/headers/RequestId"} <= references
    for reference in references:
        found: Any = document
        for step in reference.split("/"):
            found = found[step]
        assert found


def test_a_body_names_the_models_of_its_task(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for body in ("ClassifyBody", "VllmClassifyBody"):
        kinds = schemas[body]["properties"]["model"]["anyOf"]
        assert [kind.get("enum") for kind in kinds] == [["c"], None]
    for body in ("EmbeddingsBody", "RerankBody", "ScoreBody"):
        kinds = schemas[body]["properties"]["model"]["anyOf"]
        assert [kind.get("enum") for kind in kinds] == [["e"], None]
    kinds = schemas["ChatRequest"]["properties"]["model"]["anyOf"]
    assert [kind.get("enum") for kind in kinds] == [["m"], None]


async def test_the_document_is_made_once(client: Client) -> None:
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
    client: Client, document: dict[str, Any], path: str
) -> None:
    broken: list[Step] = [
        [TextDelta((1,), "a", logprobs=(told(1),))],
        GenerationFailedError("gone"),
    ]
    client.backend.scripts = [[*broken[:1], [TextDelta((2,), "b", FinishReason.STOP)]], broken]
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


async def test_reasoning_and_calls_are_what_the_document_says(
    config: AppConfig, document: dict[str, Any]
) -> None:
    text = '<think>Hm.</think><tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    steps: list[Step] = [[TextDelta((1,), text, FinishReason.STOP)]]
    backend = FakeBackend(steps, tool_call_format="hermes")
    backend.reason()
    transport = httpx.ASGITransport(build_app(AppParts(config, {"m": backend})))
    path = "/v1/chat/completions"
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"model": "m", "messages": MESSAGES, "tools": tools}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        whole = (await client.post(path, json=body)).json()
        streamed = events_of((await client.post(path, json={**body, "stream": True})).content)
    validator(response_of(document, path, 200)).validate(whole)
    schemas = document["components"]["schemas"]
    message = whole["choices"][0]["message"]
    assert message["tool_calls"]
    assert message["reasoning_content"] == "Hm."
    assert set(message) == set(schemas["AnswerMessage"]["properties"])
    for event in streamed[:-1]:
        Draft202012Validator(event_schema(document, path)).validate(event)
        (choice,) = event["choices"]
        assert set(choice["delta"]) <= set(schemas["ChatDelta"]["properties"])
        for call in choice["delta"].get("tool_calls", ()):
            assert set(call) <= set(schemas["ToolCallDelta"]["properties"])
    assert choice["finish_reason"] == "tool_calls"


async def test_the_page_loads_nothing_from_elsewhere(client: Client) -> None:
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    loaded.remove("data:,")  # no icon
    assert len(loaded) == 3
    for path in loaded:
        answer = await client.get(str(httpx.URL("http://test/docs").join(path)))
        assert answer.status_code == 200
        assert answer.content


async def test_the_page_s_policy_forbids_inline_scripts_and_foreign_sources(client: Client) -> None:
    page = await client.get("/docs")
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "http" not in page.headers["content-security-policy"]
    scripts = re.findall(r"<script([^>]*)>([^<]*)</script>", page.text)
    assert all("src=" in attributes and not content for attributes, content in scripts)
    assert " style=" not in page.text


async def test_the_script_loads_our_document(client: Client, document: dict[str, Any]) -> None:
    script = (await client.get("/docs/start.js")).text
    assert 'url: "openapi.json"' in script
    assert document["openapi"].startswith("3.1")


@pytest.mark.parametrize("path", ["/docs/nothing.js", "/docs/../config.py", "/docs/%2e%2e/docs.py"])
async def test_nothing_else_is_served_beside_the_page(client: Client, path: str) -> None:
    answer = await client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


async def test_a_wrong_method_beside_the_page_names_the_right_ones(client: Client) -> None:
    answer = await client.post("/docs/start.js")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
