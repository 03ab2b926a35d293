from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.contract.messages import Tool
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.offenders import every, for_each
from tests.serve_app.apps import AppClient, Client, client_of
from tests.serve_app.fakes import FakeBackend

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(tool_call_format="hermes")


@pytest.fixture
def config() -> AppConfig:
    return AppConfig.model_validate(
        {
            "models": [{"id": "m", "source": "nowhere"}],
            "limits": {"max_num_tools": 3, "max_tools_bytes": 400},
        }
    )


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


async def refusal(client: AppClient, **fields: Any) -> Any:
    return (await client.ask(CHAT, {**HI, **fields}, 400)).json()["error"]


async def test_tools_reach_the_replica_unchanged(client: Client) -> None:
    schema = {"type": "object", "properties": {"città": {"type": "string"}}}
    tools = [tool("get", description="Gets.", parameters=schema), tool("no_args")]
    assert (await client.post(CHAT, json={**HI, "tools": tools})).status_code == 200
    assert client.backend.requests[0].tools == (
        Tool("get", "Gets.", '{"type": "object", "properties": {"città": {"type": "string"}}}'),
        Tool(
            "no_args", None, '{"type": "object", "properties": {}, "additionalProperties": false}'
        ),
    )


@for_each(
    ([tool("a"), tool("b"), tool("c"), tool("d")], "tools", "limits.max_num_tools"),
    ([tool("a"), tool("b", description="x" * 400)], "tools[1]", "limits.max_tools_bytes"),
    ([tool("a", parameters={"x": "é" * 200})], "tools[0]", "limits.max_tools_bytes"),
    ([tool("a"), tool("a")], "tools[1].function.name", "'a'"),
    ([tool("")], "tools[0].function.name", "{1,128}"),
    ([tool("a"), tool("no space")], "tools[1].function.name", "{1,128}"),
    ([tool("a\n")], "tools[0].function.name", "{1,128}"),
    ([tool("x" * 129)], "tools[0].function.name", "{1,128}"),
    ([{"type": "function"}], "tools[0].function", "missing"),
    ([{"type": "custom", "custom": {}}], "tools[0].type", "custom"),
    ([{**tool(), "type": "retrieval"}], "tools[0].type", "'function'"),
    ([tool(parameters=[])], "tools[0].function.parameters", "must be an object"),
    ([tool(parameters={"type": "array"})], "tools[0].function.parameters.type", "'object'"),
    ([tool(strict="yes")], "tools[0].function.strict", "true or false"),
    ([tool(parametres={})], "tools[0].function.parametres", "'parameters'"),
    ({"f": 1}, "tools", "list"),
)
async def test_invalid_tools_are_refused_by_name(
    tools: Any, param: str, hint: str, client: Client
) -> None:
    error = await refusal(client, tools=tools)
    assert error["param"] == param
    assert hint in error["message"]
    assert not client.backend.requests


@for_each(
    ("some", "tool_choice"),
    (1, "tool_choice"),
    ({"type": "function"}, "tool_choice.function"),
    ({"type": "function", "function": {"name": "g"}}, "tool_choice.function.name"),
    ({"type": "function", "function": {"name": "g!"}}, "tool_choice.function.name"),
    ({"type": "allowed_tools", "allowed_tools": {}}, "tool_choice.allowed_tools.mode"),
    ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
    (
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("g")]}},
        "tool_choice.allowed_tools.tools",
    ),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, "tool_choice"),
)
async def test_an_invalid_tool_choice_is_refused(choice: Any, param: str, client: Client) -> None:
    assert (await refusal(client, tools=[tool()], tool_choice=choice))["param"] == param


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_offered(client: Client, mode: str) -> None:
    allowed = {"mode": mode, "tools": [tool("g")]}
    fields = {
        "tools": [tool("f"), {"type": "web_search"}, tool("g")],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
    }
    answer = await client.ask(CHAT, {**HI, **fields})
    assert [each.name for each in client.backend.requests[0].tools] == ["g"]
    assert (client.backend.requests[0].sampling.grammar is not None) == (mode == "required")
    assert answer.headers["x-raystream-warning"] == "Tools that do not run here: web_search"


async def test_a_required_or_named_call_needs_tools(client: Client) -> None:
    no_tools: list[Any] = [None, []]
    for case in every(
        (tools, choice)
        for tools in no_tools
        for choice in ("required", {"type": "function", "function": {"name": "f"}})
    ):
        with case as (tools, choice):
            error = await refusal(client, tools=tools, tool_choice=choice)
            assert error["param"].startswith("tool_choice")


@pytest.mark.parametrize("choice", ["none", "auto", None])
async def test_a_choice_without_tools_is_accepted(client: Client, choice: str | None) -> None:
    fields = {"tool_choice": choice, "parallel_tool_calls": False}
    assert (await client.post(CHAT, json={**HI, **fields})).status_code == 200
    assert client.backend.requests[0].tools == ()


async def test_with_tool_choice_none_the_prompt_describes_no_tools(client: Client) -> None:
    fields = {"tools": [tool()], "tool_choice": "none"}
    assert (await client.post(CHAT, json={**HI, **fields})).status_code == 200
    assert client.backend.requests[0].tools == ()


@pytest.fixture
async def plain_client(config: AppConfig) -> AsyncIterator[AppClient]:
    async with client_of(build_app(AppParts(config, {"m": FakeBackend()}))) as client:
        yield client


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool()]}, "tools"),
        ({"messages": [*HI["messages"], {"role": "assistant", "tool_calls": [CALL]}]},
         "messages[1].tool_calls"),
        ({"messages": [{"role": "tool", "tool_call_id": "c1", "content": "1"}]},
         "messages[0].role"),
    ],
)  # fmt: skip
async def test_a_model_whose_template_does_not_support_tools_refuses_them(
    plain_client: AppClient, fields: dict[str, Any], param: str
) -> None:
    error = await refusal(plain_client, **fields)
    assert error["param"] == param
    assert "chat template of 'm' does not support tools" in error["message"]


async def test_tools_are_refused_if_the_format_of_calls_is_unknown(config: AppConfig) -> None:
    backend = FakeBackend(tool_call_format="none")
    async with client_of(build_app(AppParts(config, {"m": backend}))) as client:
        assert "tool_call_parser" in (await refusal(client, tools=[tool()]))["message"]
