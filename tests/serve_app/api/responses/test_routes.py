import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from openai.types.responses import Response
from PIL import Image

from deployments.contract.errors import GenerationFailedError, InvalidRequestError, OverloadedError
from deployments.contract.messages import ChatMessage, ImagePart, TextPart
from deployments.contract.output import FinishReason
from deployments.contract.sampling_params import GRAMMAR_PARAM
from serve_app.api.responses.answer_schema import ResponsesEvent
from serve_app.http.warning_header import WARNING_HEADER
from tests.images import data_uri
from tests.offenders import for_each
from tests.serve_app.apps import AppClient, Client
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fakes import CALL, HELLO, FakeBackend, text_of

RESPONSES = "/v1/responses"
HI: dict[str, Any] = {"model": "m", "input": "hi"}
TOOL = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
IMAGE = data_uri(Image.new("RGB", (3, 2)))


async def streamed(client: AppClient, **fields: Any) -> list[dict[str, Any]]:
    """Return a stream's events, named by their types and numbered from 0."""
    answer = await client.ask(RESPONSES, {**HI, **fields, "stream": True})
    events = []
    for frame in answer.content.decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        ResponsesEvent.model_validate(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


async def test_a_whole_answer_has_openai_s_shape(client: Client) -> None:
    body = {**HI, "metadata": {"a": "b"}, "store": True}
    answer = await client.post(RESPONSES, json=body, headers={"x-request-id": "mine"})
    told = answer.json()
    Response.model_validate(told)
    assert told == {
        "id": "resp_mine",
        "object": "response",
        "created_at": 1_700_000_000,
        "status": "completed",
        "model": "m",
        "output": [
            {
                "type": "message",
                "id": "item_mine_0",
                "status": "completed",
                "role": "assistant",
                "content": [
                    {
                        "type": "output_text",
                        "text": "Hello, world!",
                        "annotations": [],
                        "logprobs": [],
                    }
                ],
            }
        ],
        "usage": {
            "input_tokens": 7,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 12,
        },
        "error": None,
        "incomplete_details": None,
        "store": False,
        "background": False,
        "previous_response_id": None,
        "truncation": "disabled",
        "instructions": None,
        "max_output_tokens": None,
        "temperature": None,
        "top_p": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None, "summary": None},
        "metadata": {"a": "b"},
    }


async def test_a_stream_s_events_come_in_openai_s_order(client: Client) -> None:
    whole = (await client.post(RESPONSES, json=HI, headers={"x-request-id": "x"})).json()
    events = await streamed(client)
    assert kinds_of(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[2]["item"]["content"] == []
    assert [event["delta"] for event in events[4:7]] == ["Hello", ", world", "!"]
    assert events[7]["text"] == events[8]["part"]["text"] == "Hello, world!"
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert (last["usage"], last["status"]) == (whole["usage"], "completed")


async def test_deltas_are_sent_as_they_arrive(app: FastAPI, backend: FakeBackend) -> None:
    release = asyncio.Event()
    backend.steps = [HELLO[0], release, *HELLO[1:]]
    async with AsgiCall(app, RESPONSES, {**HI, "stream": True}) as call:
        await call.wait_until(lambda: b"Hello" in call.body)
        assert b"response.completed" not in call.body
        release.set()
        await call.end()
    assert b"response.completed" in call.body


async def test_an_answer_that_its_limit_cuts_is_incomplete(client: Client) -> None:
    client.backend.steps = text_of("a", finish=FinishReason.LENGTH)
    whole = (await client.post(RESPONSES, json={**HI, "max_output_tokens": 1})).json()
    last = (await streamed(client, max_output_tokens=1))[-1]
    assert last["type"] == "response.incomplete"
    for told in (whole, last["response"]):
        assert told["status"] == told["output"][0]["status"] == "incomplete"
        assert told["incomplete_details"] == {"reason": "max_output_tokens"}
    assert client.backend.requests[0].sampling.max_tokens == 1


async def test_a_broken_stream_ends_with_a_failed_response(client: Client) -> None:
    client.backend.steps = [*HELLO[:1], GenerationFailedError("gone")]
    *_, delta, last = await streamed(client)
    assert delta["delta"] == "Hello"
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "gone"}


async def test_a_call_is_an_item_of_its_own(caller: Client) -> None:
    whole = (await caller.post(RESPONSES, json={**HI, "tools": [TOOL]})).json()
    Response.model_validate(whole)
    text, call = whole["output"]
    assert text["content"][0]["text"] == "Well."
    assert (call["name"], call["arguments"], call["status"]) == ("f", '{"a": 1}', "completed")
    assert call["call_id"] != call["id"]
    events = await streamed(caller, tools=[TOOL])
    assert kinds_of(events)[-5:] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert events[-5]["item"]["arguments"] == ""
    assert events[-4]["delta"] == events[-3]["arguments"] == '{"a": 1}'
    assert events[-1]["response"]["output"][1] == events[-2]["item"]
    assert {event["output_index"] for event in events[-5:-1]} == {1}


@pytest.mark.parametrize(
    ("fields", "must_call", "num_calls"),
    [
        ({}, False, 2),
        ({"parallel_tool_calls": False}, False, 1),
        ({"tool_choice": "required"}, True, 2),
        ({"tool_choice": {"type": "function", "name": "f"}}, True, 1),
        ({"tool_choice": "none"}, False, 0),
    ],
)
async def test_tool_choice_is_kept(
    caller: Client, fields: dict[str, Any], must_call: bool, num_calls: int
) -> None:
    caller.backend.steps = text_of(CALL, CALL)
    whole = (await caller.post(RESPONSES, json={**HI, "tools": [TOOL], **fields})).json()
    assert [item["type"] for item in whole["output"]].count("function_call") == num_calls
    assert (caller.backend.requests[0].sampling.grammar is not None) == must_call


async def test_reasoning_is_an_item_before_the_text(client: Client) -> None:
    client.backend.reason()
    client.backend.steps = text_of("<think>", "Hm", ".", "</think>", "Yes.")
    whole = (await client.post(RESPONSES, json=HI)).json()
    Response.model_validate(whole)
    thought, text = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert text["content"][0]["text"] == "Yes."
    events = await streamed(client)
    assert kinds_of(events)[2:9] == [
        "output_item.added",
        "content_part.added",
        *["reasoning_text.delta"] * 2,
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]


async def test_the_prompt_is_what_the_items_say(caller: Client) -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "one"},
                {"type": "input_image", "image_url": IMAGE, "detail": "auto"},
            ],
        },
        {"type": "reasoning", "id": "r", "summary": [], "content": [
            {"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "two"},
    ]  # fmt: skip
    body = {**HI, "instructions": "You explain.", "input": items}
    assert (await caller.post(RESPONSES, json=body)).status_code == 200
    messages: Any = caller.backend.requests[0].prompt
    roles = ["system", "system", "user", "assistant", "tool"]
    assert [message.role for message in messages] == roles
    assert [message.parts[0].text for message in messages[:2]] == ["You explain.", "Be kind."]
    assert isinstance(messages[2].parts[1], ImagePart)
    assert messages[3].reasoning_content == "Hm."
    assert messages[3].tool_calls[0].arguments == '{"a": 1}'
    assert (messages[4].name, messages[4].parts[0].text) == ("f", "two")


async def test_an_answer_s_items_come_back_as_they_are(caller: Client) -> None:
    first = (await caller.post(RESPONSES, json={**HI, "tools": [TOOL]})).json()
    call = first["output"][1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    items = [{"role": "user", "content": "hi"}, *first["output"], result]
    await caller.ask(RESPONSES, {**HI, "input": items, "tools": [TOOL]})


async def test_what_asks_for_nothing_is_accepted_and_hosted_tools_are_named_in_a_header(
    caller: Client,
) -> None:
    body = {
        **HI,
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {"thread_id": "t"},
        "tools": [{"type": "web_search", "external_web_access": False}, TOOL, {"type": "mcp"}],
    }
    answer = await caller.ask(RESPONSES, body)
    assert answer.headers["x-raystream-warning"] == "Tools that do not run here: mcp, web_search"
    assert [tool.name for tool in caller.backend.requests[0].tools] == ["f"]
    assert [tool["name"] for tool in answer.json()["tools"]] == ["f"]


async def test_functions_of_a_namespace_are_called_by_it_and_come_back(caller: Client) -> None:
    caller.backend.steps = text_of(CALL.replace('"f"', '"n__f"'))
    namespace = {"type": "namespace", "name": "n", "description": "N.", "tools": [TOOL]}
    body = {**HI, "tools": [TOOL, namespace]}
    whole = (await caller.post(RESPONSES, json=body)).json()
    Response.model_validate(whole)
    (call,) = whole["output"]
    assert (call["namespace"], call["name"]) == ("n", "f")
    assert [tool.name for tool in caller.backend.requests[0].tools] == ["f", "n__f"]
    streamed_call = (await streamed(caller, **body))[-1]["response"]["output"][0]
    assert (streamed_call["namespace"], streamed_call["name"]) == ("n", "f")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    items = [{"role": "user", "content": "hi"}, call, result]
    assert (await caller.post(RESPONSES, json={**body, "input": items})).status_code == 200
    messages = [
        each for each in caller.backend.requests[-1].prompt if isinstance(each, ChatMessage)
    ]
    assert messages[1].tool_calls[0].name == messages[2].name == "n__f"


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_offered(caller: Client, mode: str) -> None:
    choice = {
        "type": "allowed_tools",
        "mode": mode,
        "tools": [{"type": "function", "name": "g"}, {"type": "web_search"}],
    }
    body = {**HI, "tools": [TOOL, {**TOOL, "name": "g"}], "tool_choice": choice}
    answer = await caller.ask(RESPONSES, body)
    assert answer.json()["tool_choice"] == choice
    (request,) = caller.backend.requests
    assert [tool.name for tool in request.tools] == ["g"]
    assert (request.sampling.grammar is not None) == (mode == "required")


async def test_a_refusal_of_an_earlier_turn_is_text(client: Client) -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    hi = {"role": "user", "content": "hi"}
    whole = {"role": "assistant", "content": None, "refusal": "No."}
    chat = "/v1/chat/completions"
    for path, name, turn in (
        (RESPONSES, "input", refused),
        (chat, "messages", refused),
        (chat, "messages", whole),
    ):
        await client.ask(path, {"model": "m", name: [hi, turn, hi]})
        messages = [
            each for each in client.backend.requests[-1].prompt if isinstance(each, ChatMessage)
        ]
        assert messages[1].parts == (TextPart("No."),)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object"},
        {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True},
    ],
)
async def test_a_format_constrains_the_text(client: Client, form: dict[str, Any]) -> None:
    answer = await client.ask(RESPONSES, {**HI, "text": {"format": form}})
    assert answer.json()["text"]["format"]["type"] == form["type"]
    assert client.backend.requests[0].sampling.grammar is not None


@for_each(
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
     "input[0].content[0].type"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]},
     "input[0].call_id"),
    ({"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": "https://x.test/a.png"}]}],
      "instructions": "b"}, "input[0].content[1].image_url"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "f", "format": {}}]}, "tools[0].type"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f"}]}]},
     "tools[0].tools[0].type"),
    ({"tools": [{"type": "namespace", "name": "n" * 100, "tools": [{**TOOL, "name": "f" * 100}]}]},
     "tools[0].tools[0].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "g"}]}}, "tool_choice.tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"text": {"format": {"type": "json_schema", "name": "s", "strict": True,
                          "schema": {"type": "nothing"}}}}, "text.format"),
)  # fmt: skip
async def test_what_is_not_honoured_is_refused_by_name(
    fields: dict[str, Any], param: str, caller: Client
) -> None:
    error = await caller.refused(RESPONSES, {**HI, **fields})
    assert error["param"].startswith(param)
    assert error["param"] in error["message"]
    assert caller.backend.requests == []


async def test_an_effort_is_named_in_the_warning_header_where_the_template_has_no_setting(
    client: Client,
) -> None:
    answer = await client.ask(RESPONSES, {**HI, "reasoning": {"effort": "medium"}})
    assert answer.headers[WARNING_HEADER].startswith("reasoning.effort: the chat template of 'm'")
    assert answer.json()["reasoning"]["effort"] == "medium"
    assert client.backend.requests[0].template_kwargs == ()


async def test_an_overload_has_openai_s_shape(client: Client) -> None:
    client.backend.refusal = OverloadedError("no", None, 17)
    answer = await client.post(RESPONSES, json={**HI, "stream": True})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "17")
    assert answer.json()["error"]["code"] == "overloaded"


async def test_every_event_is_what_the_document_says(caller: Client) -> None:
    document = (await caller.get("/openapi.json")).json()
    response = document["paths"][RESPONSES]["post"]["responses"]
    content = response["200"]["content"]["text/event-stream"]["schema"]
    schema = content["properties"]["data"]["anyOf"][1]["contentSchema"]
    validator = Draft202012Validator({**schema, "components": document["components"]})
    for event in await streamed(caller, tools=[TOOL]):
        validator.validate(event)
    assert not validator.is_valid({"type": "response.begun", "sequence_number": 0})


@for_each({str(i): "" for i in range(17)}, {"a" * 65: ""}, {"a": "b" * 513}, {"a": {"b": "c"}})
async def test_metadata_has_openai_s_bounds(metadata: dict[str, object], client: Client) -> None:
    error = await client.refused(RESPONSES, {**HI, "metadata": metadata})
    assert error["param"].startswith("metadata")


async def test_a_replica_s_refusal_of_a_grammar_names_the_client_s_field(client: Client) -> None:
    client.backend.refusal = InvalidRequestError("The schema needs too much.", GRAMMAR_PARAM)
    error = await client.refused(RESPONSES, HI)
    assert error["param"] == "text.format"
