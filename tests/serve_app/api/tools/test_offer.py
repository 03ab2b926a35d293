"""The embedded model calls tools. It was not trained to, so the grammar forces it."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from PIL import Image, ImageDraw

from deployments.generator_replica import GeneratorReplica
from serve_app.config import AppConfig
from tests.engines import EngineName, chat_model, only_raystream
from tests.images import data_uri
from tests.serve_app.apps import AppClient
from tests.serve_app.local_replica import local_client, local_generator
from tests.serve_app.sse_decoder import events_of

FOLDER = Path(__file__).resolve().parents[4] / "models/pydoc-chat"
CHAT = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "depth": {"type": "integer", "minimum": 0, "maximum": 9},
        "kind": {"enum": ["module", "function"]},
    },
    "required": ["name", "depth", "kind"],
    "additionalProperties": False,
}
ASK: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "What does os.path.join do?"}],
    "tools": [
        {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "list_all"}},
    ],
    "max_tokens": 200,
}


@pytest.fixture(scope="module")
def generator(
    tmp_path_factory: pytest.TempPathFactory, engine_name: EngineName
) -> Iterator[GeneratorReplica]:
    folder = chat_model(engine_name, tmp_path_factory.mktemp("chat"))
    with local_generator(folder, engine_name, max_model_len=1024) as made:
        yield made


@pytest.fixture
async def client(
    generator: GeneratorReplica, config: AppConfig
) -> AsyncIterator[httpx.AsyncClient]:
    async with local_client(generator, config) as client:
        yield client


async def test_the_embedded_model_s_template_supports_tools(generator: GeneratorReplica) -> None:
    description = await generator.describe()
    assert description.accepts_tools
    assert description.tool_call_format == "hermes"
    assert description.tool_call_token_ids == ()


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_stop_strings_do_not_cut_a_required_call(client: AppClient, path: str) -> None:
    look_up, *_ = ASK["tools"]
    fields: dict[str, Any] = {"tools": [look_up], "tool_choice": "required", "stop": ["depth", "m"]}
    if path != CHAT:
        tool = {"name": "look_up", "input_schema": SCHEMA}
        fields = {"tools": [tool], "tool_choice": {"type": "any"}, "stop_sequences": ["depth", "m"]}
    told = (await client.post(path, json={**ASK, **fields, "temperature": 0})).json()
    if path == CHAT:
        (call, *_) = told["choices"][0]["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    else:
        assert told["stop_sequence"] is None
        jsonschema.validate(told["content"][0]["input"], SCHEMA)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.5, "seed": 1}])
async def test_a_required_call_is_valid_by_the_schema(
    client: AppClient, fields: dict[str, Any]
) -> None:
    choice = {"type": "function", "function": {"name": "look_up"}}
    answer = await client.post(CHAT, json={**ASK, "tool_choice": choice, **fields})
    (told,) = answer.json()["choices"]
    assert told["finish_reason"] == "tool_calls"
    assert told["message"]["content"] is None
    (call,) = told["message"]["tool_calls"]
    assert call["function"]["name"] == "look_up"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.soak), 16])
@pytest.mark.parametrize("is_named", [True, False], ids=["named", "required"])
async def test_a_required_call_is_never_text_wherever_max_tokens_cuts_it(
    client: AppClient, is_named: bool, step: int
) -> None:
    choice = {"type": "function", "function": {"name": "look_up"}} if is_named else "required"
    asked = {**ASK, "tool_choice": choice, "parallel_tool_calls": False, "temperature": 0}
    whole = (await client.post(CHAT, json=asked)).json()
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    for max_tokens in range(1, whole["usage"]["completion_tokens"], step):
        cut = {**asked, "max_tokens": max_tokens}
        (told,) = (await client.post(CHAT, json=cut)).json()["choices"]
        assert (told["finish_reason"], told["message"]["content"] or "") == ("length", "")
        streamed = events_of((await client.post(CHAT, json={**cut, "stream": True})).content)
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed[:-1]]
        assert "".join(delta.get("content") or "" for delta in deltas) == ""
        for begun in told["message"].get("tool_calls", []):
            assert begun["function"]["name"] == call["function"]["name"]
            assert call["function"]["arguments"].startswith(begun["function"]["arguments"])


@pytest.mark.slow
async def test_a_function_is_called_and_its_result_is_accepted(client: AppClient) -> None:
    asked = {**ASK, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    counted = {key: ASK[key] for key in ("messages", "tools")}
    num_prompt_tokens = (await client.post("/tokenize", json=counted)).json()["count"]
    streamed = events_of((await client.post(CHAT, json={**asked, "stream": True})).content)
    whole = (await client.post(CHAT, json=asked)).json()
    assert whole["usage"]["prompt_tokens"] == num_prompt_tokens
    message = whole["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] in ("look_up", "list_all")
    deltas = [c["choices"][0]["delta"] for c in streamed[:-1]]
    pieces = [d["tool_calls"][0]["function"]["arguments"] for d in deltas if "tool_calls" in d]
    assert "".join(pieces) == call["function"]["arguments"]
    returned = {"role": "tool", "tool_call_id": call["id"], "content": "Join paths."}
    messages = [*ASK["messages"], message, returned]
    answer = await client.post(CHAT, json={**ASK, "messages": messages, "max_tokens": 4})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] >= 1


@only_raystream("images are refused with vLLM")
async def test_the_model_sees_the_image_in_a_tool_s_result(generator: GeneratorReplica) -> None:
    drawn = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(drawn).ellipse((12, 12, 52, 52), fill="red")
    image = {"type": "image", "source": {"type": "url", "url": data_uri(drawn)}}
    call = {"type": "tool_use", "id": "a", "name": "look_up", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    body = {
        "model": "m",
        "max_tokens": 20,
        "temperature": 0,
        "tools": [{"name": "look_up", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": "Look at it."},
            {"role": "assistant", "content": [call]},
            {
                "role": "user",
                "content": [result, {"type": "text", "text": "What is in the picture?"}],
            },
        ],
    }
    config = AppConfig.model_validate({"models": [{"id": "m", "source": "nowhere"}]})
    async with local_client(generator, config) as client:
        answer = await client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert "red circle" in answer.json()["content"][0]["text"], answer.text
