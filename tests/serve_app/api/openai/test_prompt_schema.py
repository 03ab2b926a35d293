from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError

from deployments.contract.messages import ChatMessage, ImagePart, TextPart, ToolCall
from deployments.contract.model_spec import ModelConfig
from serve_app.api.body.echoed_fields import IN_CALLS, IN_MESSAGES, IN_PARTS
from serve_app.api.chat.schema import ChatRequest
from serve_app.api.openai.prompt_schema import MAX_NUM_PARTS
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.images import data_uri
from tests.offenders import for_each
from tests.serve_app.apps import client_of, make_app
from tests.serve_app.fakes import FakeBackend

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "messages",
    [
        [HI["messages"][0]] * (MAX_NUM_PARTS + 1),
        [{"role": "user", "content": [{"type": "text", "text": ""}] * (MAX_NUM_PARTS + 1)}],
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/text-generation"])
async def test_too_many_parts_are_refused_by_their_number(path: str, messages: list[Any]) -> None:
    app = build_app(
        AppParts(AppConfig(models=(ModelConfig(id="m", source="x"),)), {"m": FakeBackend()})
    )
    async with client_of(app) as client:
        error = await client.refused(path, {"model": "m", "messages": messages})
    assert error["param"] == "messages"
    message = error["message"]
    assert f"{MAX_NUM_PARTS + 1} messages, parts and calls together" in message
    assert f"at most {MAX_NUM_PARTS} are read. Leave out early messages" in message


@pytest.mark.parametrize(
    "fields", [{"messages": [0] * 3}, {"messages": [{"role": "user", "content": [0] * 3}]}]
)
def test_a_list_is_validated_up_to_the_first_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({**HI, **fields})
    assert caught.value.error_count() == 1


async def asked(messages: list[Any], **fields: Any) -> tuple[ChatMessage, ...]:
    """Send messages to a model that takes tools, and return what its replica is asked."""
    backend = FakeBackend(tool_call_format="hermes")
    async with client_of(make_app(backend)) as client:
        answer = await client.post(CHAT, json={"model": "m", "messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    prompt = backend.requests[0].prompt
    return tuple(message for message in prompt if isinstance(message, ChatMessage))


async def refused(message: dict[str, Any]) -> dict[str, Any]:
    async with client_of(make_app(FakeBackend(tool_call_format="hermes"))) as client:
        answer = await client.post(CHAT, json={"model": "m", "messages": [message]})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


USER: dict[str, Any] = {"role": "user", "content": "What time is it?"}
CALL: dict[str, Any] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "clock", "arguments": "{}"},
}
ANSWERED = ChatMessage("assistant", (TextPart("Noon."),))
CALLED = ChatMessage("assistant", (), (ToolCall("c1", "clock", "{}"),))
OPENAI: dict[str, Any] = {
    "content": "Noon.",
    "refusal": None,
    "role": "assistant",
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": None,
}
LITELLM: dict[str, Any] = {
    "content": "Noon.",
    "role": "assistant",
    "tool_calls": None,
    "function_call": None,
    "annotations": [],
    "images": [],
    "thinking_blocks": None,
    "provider_specific_fields": {"refusal": None},
}
LITELLM_CALL: dict[str, Any] = {
    "content": None,
    "role": "assistant",
    "function_call": None,
    "tool_calls": [{"index": 0, **CALL, "provider_specific_fields": None}],
    "provider_specific_fields": {"refusal": None, "annotations": []},
}
PARSED: dict[str, Any] = {**OPENAI, "parsed": {"time": "noon"}}
PARSED_CALL: dict[str, Any] = {
    **OPENAI,
    "content": None,
    "parsed": None,
    "tool_calls": [
        {**CALL, "function": {**CALL["function"], "parsed_arguments": {"zone": None}}}
    ],
}  # fmt: skip
OPENROUTER: dict[str, Any] = {**OPENAI, "reasoning": None, "reasoning_details": []}
DELTAS: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{**CALL, "type": None, "index": 0}],
}


@for_each(
    (OPENAI, ANSWERED),
    (LITELLM, ANSWERED),
    (LITELLM_CALL, CALLED),
    (PARSED, ANSWERED),
    (PARSED_CALL, CALLED),
    (OPENROUTER, ANSWERED),
    (DELTAS, ChatMessage("assistant", (TextPart(""),), CALLED.tool_calls)),
)
async def test_an_answer_comes_back_as_the_client_keeps_it(
    answer: dict[str, Any], message: ChatMessage
) -> None:
    assert (await asked([USER, answer, USER]))[1] == message


VLLM_REASONED = {"role": "assistant", "content": "Noon.", "reasoning_content": "Sun is high."}
LITELLM_REASONED = {
    **LITELLM,
    "reasoning_content": "Sun is high.",
    "provider_specific_fields": {"refusal": None, "reasoning_content": "Sun is high."},
}


@pytest.mark.parametrize(
    "answer",
    [
        VLLM_REASONED,
        LITELLM_REASONED,
        {"role": "assistant", "content": "Noon.", "reasoning": "Sun is high."},
        {**VLLM_REASONED, "reasoning": "Sun is high.", "reasoning_details": None},
        {**LITELLM, "provider_specific_fields": {"reasoning_content": "Sun is high."}},
    ],
)
async def test_an_answer_s_reasoning_comes_back_with_it(answer: dict[str, Any]) -> None:
    assert (await asked([USER, answer]))[1] == ChatMessage(
        "assistant", (TextPart("Noon."),), reasoning_content="Sun is high."
    )


async def test_an_answer_that_was_cut_while_it_reasoned_comes_back() -> None:
    cut = {"role": "assistant", "content": None, "reasoning_content": "Sun is"}
    assert (await asked([USER, cut]))[1] == ChatMessage("assistant", (), reasoning_content="Sun is")


@pytest.mark.parametrize(
    ("message", "param", "hint"),
    [
        ({**USER, "reasoning_content": "Hm."}, "messages[0].reasoning_content", "the assistant"),
        ({**VLLM_REASONED, "reasoning": "Moon."}, "messages[0].reasoning_content", "differ"),
        ({**VLLM_REASONED, "reasoning_content": 5}, "messages[0].reasoning_content", "a string"),
        ({"role": "assistant", "reasoning_content": ""}, "messages[0].content", "needs content"),
    ],
)
async def test_reasoning_that_can_not_be_taken_is_refused(
    message: dict[str, Any], param: str, hint: str
) -> None:
    error = await refused(message)
    assert error["param"] == param
    assert hint in error["message"]


SOMETHING = {"text": "what the model would not see"}
NOTHING: list[Any] = [None, "", [], {}, {"refusal": None, "more": [{}]}]
TEXT = {"type": "text", "text": "hi"}


@for_each(*sorted({*IN_MESSAGES, "provider_specific_fields"}))
async def test_an_echoed_field_of_a_message_may_carry_nothing_else_it_is_refused_by_name(
    name: str,
) -> None:
    for nothing in NOTHING if name in IN_MESSAGES else [None, {}, {"a": [""]}]:
        assert await asked([{**OPENAI, name: nothing}]) == (ANSWERED,)
    error = await refused({**OPENAI, name: SOMETHING})
    place = f"messages[0].{name}" + (".text" if name not in IN_MESSAGES else "")
    assert (error["param"], error["code"]) == (place, "unsupported_parameter")
    assert error["message"].startswith(f"{place} is not supported here")


@for_each(*sorted(IN_PARTS))
async def test_an_echoed_field_of_a_part_may_carry_nothing(name: str) -> None:
    for nothing in NOTHING:
        messages = [{"role": "user", "content": [{**TEXT, name: nothing}]}]
        assert await asked(messages) == (ChatMessage("user", (TextPart("hi"),)),)
    error = await refused({"role": "user", "content": [{**TEXT, name: SOMETHING}]})
    assert error["param"] == f"messages[0].content[0].{name}"


@for_each(*sorted(IN_CALLS))
async def test_an_echoed_field_of_a_call_may_carry_nothing(name: str) -> None:
    for nothing in NOTHING:
        assert await asked([{"role": "assistant", "tool_calls": [{**CALL, name: nothing}]}])
    error = await refused({"role": "assistant", "tool_calls": [{**CALL, name: SOMETHING}]})
    assert error["param"] == f"messages[0].tool_calls[0].{name}"


async def test_marks_of_prefixes_to_cache_are_hints() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    function = {"name": "clock", "parameters": {"type": "object"}}
    messages = [
        {"role": "system", "content": [{**TEXT, **mark}]},
        {**USER, **mark},
        {"role": "assistant", "tool_calls": [{**CALL, **mark}]},
    ]
    tools = [{"type": "function", "function": {**function, **mark}, **mark}]
    assert len(await asked(messages, tools=tools)) == 3


@pytest.mark.parametrize("detail", ["auto", "low", "high", None])
async def test_the_detail_of_an_image_is_a_hint(detail: str | None) -> None:
    url = {"url": data_uri(Image.new("RGB", (3, 2))), "detail": detail, "format": None}
    [message] = await asked(
        [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
    )
    assert [type(part) for part in message.parts] == [ImagePart]


CUT = {**CALL, "function": {"name": "clock", "arguments": '{"zone": "' + "x" * 1000}}


@pytest.mark.parametrize(
    "answer",
    [
        {**VLLM_REASONED, "reasoning_content": "x" * 1000},
        {"role": "assistant", "tool_calls": [CUT]},
    ],
)
async def test_reasoning_and_broken_calls_count_as_text_of_the_prompt(
    answer: dict[str, Any],
) -> None:
    app = make_app(FakeBackend(tool_call_format="hermes"), limits={"max_prompt_bytes": 900})
    async with client_of(app) as client:
        sent = await client.post(CHAT, json={"model": "m", "messages": [USER, answer]})
    assert "limits.max_prompt_bytes" in sent.json()["error"]["message"]
