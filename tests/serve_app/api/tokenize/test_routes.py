from typing import Any

import pytest

from deployments.contract.generation import TokenizeRequest
from deployments.contract.messages import ChatMessage, TextPart, Tool
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.offenders import for_each
from tests.serve_app.apps import Client, client_of
from tests.serve_app.fakes import FakeBackend

HI = (ChatMessage("user", (TextPart("hi"),)),)
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


async def test_tokens_are_returned_in_vllm_s_shape(client: Client) -> None:
    answer = await client.post("/tokenize", json={"model": "m", "prompt": "hi"})
    assert answer.json() == {
        "count": 2,
        "max_model_len": 128,
        "tokens": [104, 105],
        "token_strs": None,
    }


async def test_token_strings_are_returned_on_request(client: Client) -> None:
    answer = await client.post("/tokenize", json={"prompt": "hi", "return_token_strs": True})
    assert answer.json()["token_strs"] == ["h", "i"]


@pytest.mark.parametrize(
    ("body", "request_"),
    [
        ({"prompt": ""}, TokenizeRequest("")),
        ({"prompt": "a", "add_special_tokens": False}, TokenizeRequest("a", False)),
        ({"prompt": "a", "add_special_tokens": True}, TokenizeRequest("a", True)),
        ({"messages": MESSAGES}, TokenizeRequest(HI)),
        (
            {"messages": MESSAGES, "add_generation_prompt": False},
            TokenizeRequest(HI, add_generation_prompt=False),
        ),
    ],
)
async def test_the_request_s_options_reach_the_replica(
    client: Client, body: dict[str, Any], request_: TokenizeRequest
) -> None:
    assert (await client.post("/tokenize", json=body)).status_code == 200
    assert client.backend.tokenized == [request_]
    assert not client.backend.requests


@for_each(
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
    ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
    ("/tokenize", {"messages": MESSAGES, "tools": TOOLS}, "tools"),
    ("/tokenize", {"prompt": "a", "tools": TOOLS}, "tools"),
    ("/tokenize", {"prompt": "a", "model": "x"}, "model"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("/detokenize", {"tokens": [2**30]}, "tokens"),
    ("/detokenize", {"tokens": [1], "model": "x"}, "model"),
)
async def test_an_invalid_request_is_refused_by_the_field_s_name(
    path: str, body: dict[str, Any], param: str, client: Client
) -> None:
    error = await client.refused(path, body, 404 if param == "model" else 400)
    assert error["param"] == param


@pytest.mark.parametrize(("tokens", "text"), [([], ""), ([104, 105], "hi")])
async def test_tokens_become_text(client: Client, tokens: list[int], text: str) -> None:
    answer = await client.post("/detokenize", json={"tokens": tokens})
    assert answer.json() == {"prompt": text}


async def test_tools_are_counted_as_an_answer_would_count_them(config: AppConfig) -> None:
    backend = FakeBackend(tool_call_format="hermes")
    async with client_of(build_app(AppParts(config, {"m": backend}))) as client:
        answer = await client.post("/tokenize", json={"messages": MESSAGES, "tools": TOOLS})
    assert answer.status_code == 200
    tool = Tool("f", None, '{"type": "object"}')
    assert backend.tokenized == [TokenizeRequest(HI, tools=(tool,))]


async def test_the_named_model_is_asked(config: AppConfig) -> None:
    backends = {"m": FakeBackend(), "org/n": FakeBackend(model_id="org/n")}
    async with client_of(build_app(AppParts(config, backends))) as client:
        await client.post("/tokenize", json={"prompt": "a", "model": "org/n"})
    assert [len(backend.tokenized) for backend in backends.values()] == [0, 1]
