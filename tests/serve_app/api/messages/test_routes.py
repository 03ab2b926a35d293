import asyncio
import json
import textwrap
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from PIL import Image
from pydantic import ValidationError

from deployments.contract.errors import (
    GenerationFailedError,
    InvalidRequestError,
    OverloadedError,
    RaystreamError,
)
from deployments.contract.messages import ChatMessage, ImagePart, TextPart
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.sampling_params import GRAMMAR_PARAM, ReasoningTokens
from serve_app.api.messages.schema import MessagesEvent, PromptFields
from serve_app.http.warning_header import WARNING_HEADER
from tests.images import data_uri, png
from tests.offenders import for_each
from tests.serve_app.apps import ALICE, AppClient, Client, client_of, make_app, ring
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fakes import CALL, HELLO, FakeBackend, text_of

MESSAGES = "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
USER: list[Any] = [{"role": "user", "content": "hi"}]
HI: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": USER}
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
IMAGE = data_uri(Image.new("RGB", (3, 2)))


def usage(num_input: int, num_output: int, num_cached: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": num_input,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }


def named_events(body: bytes) -> list[dict[str, Any]]:
    """Return a stream's events, each named by its type, as the documents say."""
    events = []
    for frame in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "error":
            MessagesEvent.model_validate(event)
        events.append(event)
    return events


async def streamed(client: AppClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await client.ask(MESSAGES, {**HI, **fields, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return named_events(answer.content)


async def test_a_whole_answer_has_anthropic_s_shape(client: Client) -> None:
    answer = await client.post(MESSAGES, json=HI, headers={"x-request-id": "mine"})
    assert answer.json() == {
        "id": "msg_mine",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hello, world!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": usage(7, 5),
    }
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "mine"


async def test_a_stream_s_events_come_in_anthropic_s_order(client: Client) -> None:
    start, block, ping, *deltas, stop, end, last = await streamed(client)
    assert start["type"] == "message_start"
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"] == usage(7, 0)
    text = {"type": "text", "text": ""}
    assert block == {"type": "content_block_start", "index": 0, "content_block": text}
    assert ping == {"type": "ping"}
    assert [delta["delta"]["text"] for delta in deltas] == ["Hello", ", world", "!"]
    assert {(delta["type"], delta["index"]) for delta in deltas} == {("content_block_delta", 0)}
    assert stop == {"type": "content_block_stop", "index": 0}
    why = {"stop_reason": "end_turn", "stop_sequence": None}
    assert end == {"type": "message_delta", "delta": why, "usage": usage(7, 5)}
    assert last == {"type": "message_stop"}


async def test_deltas_are_sent_as_they_arrive(app: FastAPI, backend: FakeBackend) -> None:
    release = asyncio.Event()
    backend.steps = [HELLO[0], release, *HELLO[1:]]
    async with AsgiCall(app, MESSAGES, {**HI, "stream": True}) as call:
        await call.wait_until(lambda: b"Hello" in call.body)
        assert b"message_stop" not in call.body
        release.set()
        await call.end()
    assert b"message_stop" in call.body


async def test_a_stream_names_its_request(client: Client) -> None:
    answer = await client.post(MESSAGES, json={**HI, "stream": True})
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_cached_tokens_are_not_counted_as_input(client: Client) -> None:
    client.backend.steps = [[TextDelta((1,), "a", num_cached_tokens=4)], HELLO[2]]
    assert (await client.post(MESSAGES, json=HI)).json()["usage"] == usage(3, 2, 4)
    *_, end, _ = await streamed(client)
    assert end["usage"] == usage(3, 2, 4)


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        (TextDelta((1,), "a", FinishReason.STOP), "end_turn", None),
        (TextDelta((1,), "a", FinishReason.STOP, stop="END"), "stop_sequence", "END"),
        (TextDelta((1,), "a", FinishReason.LENGTH), "max_tokens", None),
    ],
)
async def test_the_stop_reason_is_the_true_one(
    client: Client, last: TextDelta, reason: str, sequence: str | None
) -> None:
    client.backend.steps = [[last]]
    whole = (await client.post(MESSAGES, json={**HI, "stop_sequences": ["END", "x"]})).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    *_, end, _ = await streamed(client, stop_sequences=["END", "x"])
    assert end["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert client.backend.requests[0].sampling.stop == ("END", "x")


async def test_an_answer_without_text_has_no_block(client: Client) -> None:
    client.backend.steps = text_of()
    assert (await client.post(MESSAGES, json=HI)).json()["content"] == []
    assert [event["type"] for event in await streamed(client)] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


async def test_sampling_fields_reach_the_replica(client: Client) -> None:
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "metadata": {"user_id": "u"}}
    assert (await client.post(MESSAGES, json={**HI, **fields})).status_code == 200
    sampling = client.backend.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature) == (9, 0.5)
    assert (sampling.top_p, sampling.top_k) == (0.25, 3)


async def test_the_prompt_is_what_the_blocks_say(caller: Client) -> None:
    body = {
        **HI,
        "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": " kind."}],
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "user", "content": [{"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "three"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"é": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": "four"},
                    {"type": "text", "text": "five"},
                ],
            },
        ],
    }
    assert (await caller.post(MESSAGES, json=body)).status_code == 200
    prompt = caller.backend.requests[0].prompt
    assert isinstance(prompt, tuple)
    messages: Any = prompt
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool", "user"]
    texts = [[part.text for part in message.parts] for message in messages]
    assert texts == [["Be", " kind."], ["one\n\ntwo"], ["three"], ["four"], ["five"]]
    assert messages[2].reasoning_content == "Hm."
    (call,) = messages[2].tool_calls
    assert (call.id, call.name, call.arguments) == ("c", "f", '{"é": 1}')
    assert (messages[3].tool_call_id, messages[3].name) == ("c", "f")


async def test_images_are_read_from_data_and_from_urls(client: Client) -> None:
    data = IMAGE.partition(",")[2]
    sources = [
        {"type": "base64", "media_type": "image/png", "data": data},
        {"type": "url", "url": IMAGE},
    ]
    content = [
        *({"type": "image", "source": source} for source in sources),
        {"type": "text", "text": "?"},
    ]
    body = {**HI, "messages": [{"role": "user", "content": content}]}
    assert (await client.post(MESSAGES, json=body)).status_code == 200
    message: Any = client.backend.requests[0].prompt[0]
    first, second, text = message.parts
    assert isinstance(first, ImagePart)
    assert first == second
    assert text == TextPart("?")


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_an_image_of_another_type_than_its_label_is_refused_as_anthropic_does(
    client: Client, path: str
) -> None:
    data = IMAGE.partition(",")[2]
    source = {"type": "base64", "media_type": "image/jpeg", "data": data}
    turn = {"role": "user", "content": [{"type": "image", "source": source}]}
    body = {key: HI[key] for key in HI if path == MESSAGES or key != "max_tokens"}
    error = (await client.ask(path, {**body, "messages": [turn]}, 400)).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"] == (
        "messages[0].content[0].source.media_type: The image was specified using the image/jpeg "
        "media type, but the image appears to be a image/png image."
    )
    assert not client.backend.requests


async def test_an_image_of_messages_may_be_in_lines_and_without_padding(client: Client) -> None:
    data = "\n".join(textwrap.wrap(IMAGE.partition(",")[2].rstrip("="), 60))
    source = {"type": "base64", "media_type": "image/png", "data": data}
    turn = {"role": "user", "content": [{"type": "image", "source": source}]}
    assert (await client.post(MESSAGES, json={**HI, "messages": [turn]})).status_code == 200
    assert client.backend.requests[0].prompt == (
        ChatMessage("user", (ImagePart(png(Image.new("RGB", (3, 2)))),)),
    )


async def test_a_call_is_a_block_of_its_own(caller: Client) -> None:
    whole = (await caller.post(MESSAGES, json={**HI, "tools": [TOOL]})).json()
    text, call = whole["content"]
    assert text == {"type": "text", "text": "Well."}
    assert call == {"type": "tool_use", "id": call["id"], "name": "f", "input": {"a": 1}}
    assert whole["stop_reason"] == "tool_use"
    events = await streamed(caller, tools=[TOOL])
    assert [event["type"] for event in events if event["type"] != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_stop",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert begun[1] == {"type": "tool_use", "id": begun[1]["id"], "name": "f", "input": {}}
    gains = [event for event in events if event.get("index") == 1 and "delta" in event]
    told = "".join(gain["delta"]["partial_json"] for gain in gains)
    assert json.loads(told) == {"a": 1}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_what_only_began_like_a_call_is_text_streamed_or_not(caller: Client) -> None:
    broken = '<tool_call>\n{"name": "f", "arguments": {"a": oops}}\n</tool_call>'
    caller.backend.steps = text_of(*broken)
    whole = (await caller.post(MESSAGES, json={**HI, "tools": [TOOL]})).json()
    (block,) = whole["content"]
    assert block == {"type": "text", "text": broken}
    assert whole["stop_reason"] == "end_turn"
    events = await streamed(caller, tools=[TOOL])
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == broken
    assert events[-2]["delta"]["stop_reason"] == "end_turn"


async def test_a_call_that_max_tokens_cuts_keeps_what_had_arrived(caller: Client) -> None:
    cut = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "c'
    caller.backend.steps = text_of(cut, finish=FinishReason.LENGTH)
    whole = (await caller.post(MESSAGES, json={**HI, "tools": [TOOL]})).json()
    assert whole["content"][0]["input"] == {"a": 1, "b": "c"}
    assert whole["stop_reason"] == "max_tokens"
    events = await streamed(caller, tools=[TOOL])
    (delta,) = (event["delta"] for event in events if event["type"] == "content_block_delta")
    assert delta["partial_json"] == '{"a": 1, "b": "c'


@pytest.mark.parametrize(
    ("choice", "must_call", "num_calls"),
    [
        (None, False, 2),
        ({"type": "auto"}, False, 2),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, 1),
        ({"type": "any"}, True, 2),
        ({"type": "tool", "name": "f"}, True, 1),
        ({"type": "none"}, False, 0),
    ],
)
async def test_tool_choice_is_kept(
    caller: Client, choice: Any, must_call: bool, num_calls: int
) -> None:
    caller.backend.steps = text_of(CALL, CALL)
    body = {**HI, "tools": [TOOL], "tool_choice": choice}
    whole = (await caller.post(MESSAGES, json=body)).json()
    kinds = [block["type"] for block in whole["content"]]
    assert kinds.count("tool_use") == num_calls
    request = caller.backend.requests[0]
    assert (request.sampling.grammar is not None) == must_call
    assert [tool.name for tool in request.tools] == ([] if num_calls == 0 else ["f"])


async def test_reasoning_is_a_block_before_the_text(client: Client) -> None:
    client.backend.reason()
    client.backend.steps = text_of("<think>", "Hm", ".", "</think>", "Yes", ".")
    whole = (await client.post(MESSAGES, json=HI)).json()
    thinking, text = whole["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
    assert text == {"type": "text", "text": "Yes."}
    assert "thinking_tokens" in whole["usage"]["output_tokens_details"]
    events = await streamed(client)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    kinds = [delta["type"] for delta in deltas]
    assert kinds == ["thinking_delta"] * 2 + ["signature_delta"] + ["text_delta"] * 2
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Hm."
    assert deltas[2]["signature"] == thinking["signature"] != ""


async def test_omitted_reasoning_comes_back_in_the_next_turn(client: Client) -> None:
    client.backend.reason()
    client.backend.steps = text_of("<think>", "Hm", " é.", "</think>", "Yes", ".")
    fields = {"thinking": {"type": "adaptive", "display": "omitted"}}
    whole = (await client.post(MESSAGES, json={**HI, **fields})).json()
    thinking, text = whole["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "")
    assert text == {"type": "text", "text": "Yes."}
    events = await streamed(client, **fields)
    starts = [each["content_block"] for each in events if each["type"] == "content_block_start"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == ["signature_delta"] + ["text_delta"] * 2
    assert deltas[0]["signature"] == thinking["signature"]
    for signature, seen in ((thinking["signature"], "Hm é."), ("omitted:?", ""), ("other", "")):
        block = {**thinking, "signature": signature}
        answered = {"role": "assistant", "content": [block, text]}
        body = {**HI, **fields, "messages": [*USER, answered, *USER]}
        assert (await client.post(MESSAGES, json=body)).status_code == 200
        messages: Any = client.backend.requests[-1].prompt
        assert (messages[1].reasoning_content or "") == seen


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, {"enable_thinking": True}),
        ({"output_config": {"effort": "low"}}, {"enable_thinking": True}),
    ],
)
async def test_thinking_is_switched_where_the_template_can(
    client: Client, fields: Any, kwargs: Any
) -> None:
    client.backend.description = replace(
        client.backend.description, template_parameters=("enable_thinking",)
    )
    assert (await client.post(MESSAGES, json={**HI, **fields})).status_code == 200
    assert dict(client.backend.requests[0].template_kwargs) == kwargs
    assert (await client.post(COUNT, json={"model": "m", "messages": USER, **fields})).is_success
    assert dict(client.backend.tokenized[0].template_kwargs) == kwargs


async def test_an_effort_is_named_in_the_warning_header_where_the_template_has_no_setting(
    client: Client,
) -> None:
    fields = {"output_config": {"effort": "low"}}
    for path, body in ((MESSAGES, HI), (COUNT, {"model": "m", "messages": USER})):
        answer = await client.ask(path, {**body, **fields})
        assert answer.headers[WARNING_HEADER].startswith("output_config.effort: the chat template")
    assert client.backend.requests[0].template_kwargs == ()


@pytest.mark.parametrize("reasons", [True, False])
async def test_a_budget_bounds_the_tokens_of_reasoning_where_there_is_any(
    client: Client, reasons: bool
) -> None:
    if reasons:
        client.backend.reason()
    thinking = {"type": "enabled", "budget_tokens": 5}
    assert (await client.post(MESSAGES, json={**HI, "thinking": thinking})).status_code == 200
    (request,) = client.backend.requests
    assert request.sampling.reasoning == (ReasoningTokens(8, 9, max_tokens=5) if reasons else None)


async def test_what_a_coding_agent_sends_is_answered(caller: Client) -> None:
    """The body is written after public reports of Claude Code; no client sent it."""
    long_name = f"mcp__plugin_{'x' * 111}__y"
    assert len(long_name) == 126
    tools = [
        {**TOOL, "eager_input_streaming": True, "input_examples": [{"a": 1}]},
        {**TOOL, "name": long_name, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    ]
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    body = {
        **HI,
        "tools": tools,
        "context_management": {"edits": edits},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
    }
    answer = await caller.ask(MESSAGES, body)
    assert [tool.name for tool in caller.backend.requests[0].tools] == ["f", long_name]
    assert answer.headers["x-raystream-warning"] == (
        "Tools that do not run here: tool_search_tool_regex_20251119, web_search_20250305"
    )


async def test_a_tool_of_a_type_that_the_client_would_run_is_refused_with_advice(
    caller: Client,
) -> None:
    tool = {"type": "bash_20250124", "name": "bash", "max_uses": 1}
    answer = await caller.post(MESSAGES, json={**HI, "tools": [tool]})
    assert answer.json()["error"]["message"] == (
        "tools[0].type must be 'custom'; bash_20250124 is not supported here: offer a tool with an "
        "input_schema, which the client runs itself."
    )


async def test_a_call_that_must_come_is_not_cut_by_stop_sequences(caller: Client) -> None:
    fields = {"tools": [TOOL], "stop_sequences": ["1"]}
    for choice, stop in (({"type": "any"}, ()), ({"type": "auto"}, ("1",))):
        await caller.ask(MESSAGES, {**HI, **fields, "tool_choice": choice})
        assert caller.backend.requests[-1].sampling.stop == stop


async def test_images_of_results_reach_the_model_in_the_user_s_turn_behind_them(
    caller: Client,
) -> None:
    image = {"type": "image", "source": {"type": "url", "url": IMAGE}}
    calls: list[Any] = [
        {"type": "tool_use", "id": name, "name": "f", "input": {}} for name in ("a", "b")
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [image]},
        {
            "type": "tool_result",
            "tool_use_id": "b",
            "content": [{"type": "text", "text": "two"}, image],
        },
    ]
    after = {"type": "text", "text": "What are these?"}
    for content in (results, [*results, after]):
        turns = [
            *USER,
            {"role": "assistant", "content": calls},
            {"role": "user", "content": content},
        ]
        await caller.ask(MESSAGES, {**HI, "messages": turns})
        messages = [
            each for each in caller.backend.requests[-1].prompt if isinstance(each, ChatMessage)
        ]
        assert [message.role for message in messages] == [
            "user", "assistant", "tool", "tool", "user",
        ]  # fmt: skip
        assert [message.parts for message in messages[2:4]] == [(TextPart(""),), (TextPart("two"),)]
        first, second, *rest = messages[4].parts
        assert isinstance(first, ImagePart)
        assert isinstance(second, ImagePart)
        assert rest == ([TextPart("What are these?")] if after in content else [])


async def test_a_schema_constrains_the_text(client: Client) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    body = {**HI, "output_config": {"format": form}}
    assert (await client.post(MESSAGES, json=body)).status_code == 200
    assert client.backend.requests[0].sampling.grammar is not None


async def test_tokens_are_counted_without_an_answer(caller: Client) -> None:
    body = {"model": "m", "system": "Be kind.", "messages": USER, "tools": [TOOL]}
    answer = await caller.post(COUNT, json=body)
    assert answer.json() == {"input_tokens": 2}
    (asked,) = caller.backend.tokenized
    assert [message.role for message in asked.prompt if not isinstance(message, str)] == [
        "system",
        "user",
    ]
    assert [tool.name for tool in asked.tools] == ["f"]
    assert asked.add_generation_prompt
    assert caller.backend.requests == []


@for_each(
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": "assistant", "content": "The"}]}, "messages[1].role"),
    ({"stop_sequences": ["x"] * 50}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"temperature": 3}, "temperature"),
    ({"seed": 5}, "seed"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
        "output_config.format",
    ),
    ({"tools": [TOOL]}, "tools"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"type": "computer_20250124", "display_width_px": 1}]}, "tools[0].type"),
    ({"tools": [{**TOOL, "name": "x" * 129}]}, "tools[0].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
)
async def test_what_is_not_honoured_is_refused_by_name_in_anthropic_s_shape(
    fields: dict[str, Any], named: str, client: Client
) -> None:
    answer = await client.post(MESSAGES, json={**HI, **fields}, headers={"x-request-id": "mine"})
    assert answer.status_code == 400
    told = answer.json()
    assert told == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": told["error"]["message"]},
        "request_id": "mine",
    }
    assert named in told["error"]["message"]
    assert answer.headers["request-id"] == "mine"
    assert answer.headers["x-should-retry"] == "false"
    assert client.backend.requests == []


@pytest.mark.parametrize(
    ("block", "named"),
    [
        (
            {"type": "image", "source": {"type": "url", "url": "https://x.test/a.png"}},
            "messages[1].content[1].source",
        ),
        (
            {"type": "tool_result", "tool_use_id": "nobody", "content": "a"},
            "messages[1].content[1].tool_use_id",
        ),
        ({"type": "document", "source": {}}, "messages[1].content[1]"),
        (
            {
                "type": "tool_result",
                "tool_use_id": "c",
                "content": [
                    {"type": "image", "source": {"type": "url", "url": "https://x.test/a.png"}}
                ],
            },
            "messages[1].content[1].content[0].source",
        ),
    ],
)
async def test_an_error_names_the_block_that_the_client_sent(
    caller: Client, block: dict[str, Any], named: str
) -> None:
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    messages = [
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, block]},
    ]
    body = {**HI, "system": "Be kind.", "messages": messages}
    error = await caller.refused(MESSAGES, body)
    assert named in error["message"]


@pytest.mark.parametrize(
    ("error", "status", "type_"),
    [
        (OverloadedError("no"), 503, "overloaded_error"),
        (RaystreamError("no"), 500, "api_error"),
        (GenerationFailedError("no"), 500, "api_error"),
    ],
)
async def test_each_failure_has_anthropic_s_type(
    client: Client, error: RaystreamError, status: int, type_: str
) -> None:
    client.backend.refusal = error
    answer = await client.post(MESSAGES, json=HI)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, type_)


@pytest.mark.parametrize(
    ("method", "path", "status", "type_"),
    [
        ("GET", MESSAGES, 405, "invalid_request_error"),
        ("POST", f"{MESSAGES}/batches", 404, "not_found_error"),
    ],
)
async def test_errors_of_the_router_have_anthropic_s_shape(
    client: Client, method: str, path: str, status: int, type_: str
) -> None:
    answer = await client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, type_)
    assert answer.json()["request_id"] == answer.headers["request-id"]


async def test_a_bug_has_anthropic_s_shape_too(app: FastAPI, backend: FakeBackend) -> None:
    backend.refusal = ZeroDivisionError("a secret")
    async with client_of(app) as client:
        answer = await client.ask(MESSAGES, HI, 500)
    assert answer.json()["error"]["type"] == "api_error"
    assert "secret" not in answer.text


async def test_a_model_that_is_not_served_is_a_404(client: Client) -> None:
    error = await client.refused(MESSAGES, {**HI, "model": "claude"}, 404)
    assert error["type"] == "not_found_error"


async def test_a_broken_stream_ends_with_the_event_of_an_error(client: Client) -> None:
    client.backend.steps = [*HELLO[:1], GenerationFailedError("gone")]
    *_, delta, last = await streamed(client)
    assert delta["delta"]["text"] == "Hello"
    assert (last["type"], last["error"]) == ("error", {"type": "api_error", "message": "gone"})


async def test_both_headers_take_a_key(backend: FakeBackend) -> None:
    async with client_of(make_app(backend, ring())) as client:
        for headers in ({"x-api-key": ALICE}, {"authorization": f"Bearer {ALICE}"}):
            assert (await client.post(MESSAGES, json=HI, headers=headers)).status_code == 200
        error = await client.refused(MESSAGES, HI, 401, headers={"x-api-key": "wrong"})
    assert error["type"] == "authentication_error"


async def test_every_event_is_what_the_document_says(caller: Client) -> None:
    document = (await caller.get("/openapi.json")).json()
    response = document["paths"][MESSAGES]["post"]["responses"]
    assert response["default"] == {"$ref": "#/components/responses/MessagesError"}
    content = response["200"]["content"]["text/event-stream"]["schema"]
    schema = content["properties"]["data"]["anyOf"][1]["contentSchema"]
    validator = Draft202012Validator({**schema, "components": document["components"]})
    caller.backend.scripts = [caller.backend.steps, [*HELLO[:1], GenerationFailedError("gone")]]
    events = await streamed(caller, tools=[TOOL]) + await streamed(caller)
    for event in events:
        validator.validate(event)
    assert not validator.is_valid({"type": "message_begin"})


async def test_a_cut_call_that_can_not_be_read_is_no_failure() -> None:
    cut = '<tool_call>\n{"name": "f", "arguments": {a: 1'
    backend = FakeBackend(text_of(cut, finish=FinishReason.LENGTH), tool_call_format="hermes")
    async with client_of(make_app(backend)) as client:
        whole = await client.post(MESSAGES, json={**HI, "tools": [TOOL]})
        events = await streamed(client, tools=[TOOL])
    assert (whole.status_code, whole.json()["stop_reason"]) == (200, "max_tokens")
    assert [(block["name"], block["input"]) for block in whole.json()["content"]] == [("f", {})]
    assert not [each for each in events if each.get("delta", {}).get("partial_json")]


@pytest.mark.parametrize("field", ["system", "messages"])
def test_blocks_are_counted_before_they_are_read(field: str) -> None:
    blocks = [{"type": "text", "text": ""}] * 4097
    value = blocks if field == "system" else [{"role": "user", "content": blocks}]
    with pytest.raises(ValidationError, match="4096"):
        PromptFields.model_validate({"model": "m", "messages": USER, field: value})


async def test_the_result_of_a_call_may_be_null(caller: Client) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": None}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    turns = [*USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    await caller.ask(COUNT, {"model": "m", "messages": turns})


async def test_a_replica_s_refusal_of_a_grammar_names_the_client_s_field(client: Client) -> None:
    client.backend.refusal = InvalidRequestError("The schema needs too much.", GRAMMAR_PARAM)
    told = (await client.ask(MESSAGES, HI, 400)).json()["error"]["message"]
    assert told == "output_config.format: The schema needs too much."
