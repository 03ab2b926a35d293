"""Chat completions with tools, where the model's text is scripted."""

import json
import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from deployments.contract.messages import ChatMessage, TextPart, ToolCall
from deployments.contract.output import FinishReason, TextDelta, TokenLogprob, TokenLogprobs
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.offenders import for_each
from tests.serve_app.apps import AppClient, Client, client_of
from tests.serve_app.fakes import HELLO, FakeBackend, Step
from tests.serve_app.sse_decoder import events_of

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time"}},
]
ASK: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": TOOLS,
}
CALLS = [("get_weather", '{"city": "Köln"}'), ("get_time", "{}")]
TEXT = (
    'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


def script(text: str, finish: FinishReason = FinishReason.STOP, size: int = 3) -> list[Step]:
    """Return a text as deltas of this size, each with one token."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    steps: list[Step] = [[TextDelta((at,), piece)] for at, piece in enumerate(pieces)]
    return [*steps, [TextDelta((99,), "", finish)]]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(script(TEXT), tool_call_format="hermes")


async def whole(client: AppClient, **fields: Any) -> Any:
    return (await client.ask(CHAT, {**ASK, **fields})).json()["choices"][0]


async def chunks_of(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await client.post(CHAT, json={**ASK, "stream": True, **fields})
    *chunks, done = events_of(answer.content)
    assert done == "[DONE]"
    return [choice for chunk in chunks for choice in chunk["choices"]]


def put_together(choices: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """Return text and calls as a client joins them from deltas."""
    text, calls = "", dict[int, list[str]]()
    for choice in choices:
        text += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                calls[call["index"]] = [call["function"]["name"], ""]
            calls[call["index"]][1] += call["function"]["arguments"]
    return text, [(name, arguments) for name, arguments in calls.values()]


async def test_calls_are_separate_from_the_text(client: Client) -> None:
    choice = await whole(client)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me look."
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == (
        CALLS
    )
    assert all(re.fullmatch("call_[a-zA-Z0-9]{24}", c["id"]) for c in message["tool_calls"])
    assert {c["type"] for c in message["tool_calls"]} == {"function"}


async def test_the_content_is_null_if_the_model_only_calls(client: Client) -> None:
    client.backend.steps = script(TEXT.removeprefix("Let me look."))
    message = (await whole(client))["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2


async def test_an_answer_without_calls_is_the_same_without_tools(client: Client) -> None:
    client.backend.steps = HELLO
    assert await whole(client) == await whole(client, tools=None)
    assert put_together(await chunks_of(client)) == ("Hello, world!", [])
    assert (await chunks_of(client))[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_streamed_text_and_calls_are_those_of_the_whole_answer(
    client: Client, size: int
) -> None:
    client.backend.steps = script(TEXT, size=size)
    choices = await chunks_of(client)
    assert put_together(choices) == ("Let me look.", CALLS)
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    assert choices[-1]["delta"] == {}


async def test_a_call_s_first_delta_has_id_and_name_and_the_others_only_arguments(
    client: Client,
) -> None:
    deltas = [c["delta"] for c in await chunks_of(client) if "tool_calls" in c["delta"]]
    assert all(len(delta["tool_calls"]) == 1 for delta in deltas)
    for index, name in enumerate(("get_weather", "get_time")):
        first, *rest = [d["tool_calls"][0] for d in deltas if d["tool_calls"][0]["index"] == index]
        assert first.keys() == {"index", "id", "type", "function"}
        assert first["function"] == {"name": name, "arguments": ""}
        assert all(d.keys() == {"index", "function"} for d in rest)
        assert all(d["function"].keys() == {"arguments"} for d in rest)
    assert len(deltas) > 5


CUT_TEXT = TEXT[: TEXT.index('Köln"}') + 2]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CUT_TEXT, "Let me look.", [("get_weather", '{"city": "Kö')]),
        (TEXT[: TEXT.index("}\n</tool_call>")], "Let me look.", [CALLS[0]]),
        (TEXT[: TEXT.rindex("}}") + 1], "Let me look.", CALLS),
        (TEXT[: TEXT.index("get_weather") + 3], "Let me look.", []),
        (TEXT[: TEXT.index("get_weather") + 12], "Let me look.", [("get_weather", "")]),
        (TEXT[: TEXT.index("<tool_call>") + 5], "Let me look.", []),
    ],
    ids=[
        "in its arguments",
        "behind them",
        "the second one",
        "in its name",
        "behind it",
        "in the mark",
    ],
)
async def test_a_call_cut_by_the_length_keeps_the_arguments_that_arrived(
    client: Client, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    client.backend.steps = script(text, FinishReason.LENGTH)
    choices = await chunks_of(client)
    assert choices[-1]["finish_reason"] == "length"
    assert put_together(choices) == (content, calls)
    choice = await whole(client)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == content
    told = [call["function"] for call in choice["message"].get("tool_calls", [])]
    assert [(call["name"], call["arguments"]) for call in told] == calls


WRITTEN = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    ),
    "llama3_json": (
        '{"name": "get_weather", "parameters": {"city": "Köln"}}; '
        '{"name": "get_time", "parameters": {}}'
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln"}}, '
        '{"name": "get_time", "arguments": {}}]'
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.STOP])
@pytest.mark.parametrize("known", WRITTEN)
async def test_required_calls_that_end_anywhere_never_become_text(
    config: AppConfig, known: str, finish: FinishReason
) -> None:
    """The finish reason is STOP if a stop string of the client's ends the text."""
    backend = FakeBackend(tool_call_format=known)
    app = build_app(AppParts(config, {"m": backend}))
    text = WRITTEN[known]
    async with client_of(app) as client:
        for end in range(1, len(text) + 1):
            backend.steps = script(text[:end], finish, size=1)
            choices = await chunks_of(client, tool_choice="required")
            content, calls = put_together(choices)
            assert content == "", text[:end]
            for (name, arguments), (whole_name, whole_arguments) in zip(calls, CALLS, strict=False):
                assert name == whole_name
                assert whole_arguments.startswith(arguments)
            assert len(calls) == text[:end].count('get_weather"') + text[:end].count('get_time"')
            choice = await whole(client, tool_choice="required")
            told = [call["function"] for call in choice["message"].get("tool_calls", [])]
            assert [(call["name"], call["arguments"]) for call in told] == calls
            assert not choice["message"]["content"]
            assert choice["finish_reason"] == choices[-1]["finish_reason"]
            if finish is FinishReason.LENGTH:
                assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("known", ["hermes", "mistral"])
async def test_chosen_calls_that_the_length_cuts_never_become_text(
    config: AppConfig, known: str
) -> None:
    backend = FakeBackend(tool_call_format=known)
    app = build_app(AppParts(config, {"m": backend}))
    text = "Let me look.\n" + WRITTEN[known]
    async with client_of(app) as client:
        for end in range(len("Let me look.\n") + 1, len(text) + 1):
            backend.steps = script(text[:end], FinishReason.LENGTH, size=1)
            content, calls = put_together(await chunks_of(client))
            assert content == "Let me look."
            choice = await whole(client)
            assert choice["message"]["content"] == content
            assert len(choice["message"].get("tool_calls", [])) == len(calls)


async def test_a_call_ended_by_a_stop_string_is_broken(client: Client) -> None:
    client.backend.steps = script(CUT_TEXT, FinishReason.STOP)
    choice = await whole(client)
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == CUT_TEXT
    assert "tool_calls" not in choice["message"]
    assert (await chunks_of(client))[-1]["finish_reason"] == "stop"


async def test_a_broken_call_is_text_and_finishes_like_text(client: Client) -> None:
    text = '<tool_call>\n{"name": "get_time", "arguments": {]}\n</tool_call>'
    client.backend.steps = script(text, size=1)
    choice = await whole(client)
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    streamed = await chunks_of(client)
    assert streamed[-1]["finish_reason"] == "stop"
    content, calls = put_together(streamed)
    assert (content, calls) == ("]}\n</tool_call>", [("get_time", "{")])


async def test_without_parallel_calls_the_first_call_is_the_last(client: Client) -> None:
    message = (await whole(client, parallel_tool_calls=False))["message"]
    assert len(message["tool_calls"]) == 1
    assert put_together(await chunks_of(client, parallel_tool_calls=False))[1] == CALLS[:1]


async def test_only_the_named_function_is_called(client: Client) -> None:
    choice = {"type": "function", "function": {"name": "get_time"}}
    calls = (await whole(client, tool_choice=choice))["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["get_time"]


async def test_with_tool_choice_none_calls_are_text(client: Client) -> None:
    choice = await whole(client, tool_choice="none")
    assert (choice["message"]["content"], choice["finish_reason"]) == (TEXT, "stop")


async def test_each_of_several_answers_has_its_own_calls(client: Client) -> None:
    client.backend.scripts = [script(TEXT), HELLO, script(TEXT, size=1), HELLO]
    answer = (await client.post(CHAT, json={**ASK, "n": 2})).json()
    assert [c["finish_reason"] for c in answer["choices"]] == ["tool_calls", "stop"]
    assert answer["usage"]["completion_tokens"] == len(script(TEXT)) + 5
    choices = await chunks_of(client, n=2)
    told = [put_together([c for c in choices if c["index"] == i]) for i in range(2)]
    assert told == [("Let me look.", CALLS), ("Hello, world!", [])]


async def test_every_token_has_logprobs_also_those_of_calls(client: Client) -> None:
    steps = script(TEXT)
    for step in steps:
        assert isinstance(step, list)
        (delta,) = step
        entry = TokenLogprobs(TokenLogprob(delta.token_ids[0], delta.text.encode(), -0.5), ())
        step[0] = TextDelta(delta.token_ids, delta.text, delta.finish_reason, logprobs=(entry,))
    client.backend.steps = steps
    told = (await whole(client, logprobs=True))["logprobs"]["content"]
    chunks = await chunks_of(client, logprobs=True)
    streamed = [entry for c in chunks if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert streamed == told
    assert "".join(entry["token"] for entry in told) == TEXT


async def test_mistral_s_mark_is_kept_in_the_text_and_its_ids_have_nine_letters(
    config: Any, app: FastAPI, client: Client
) -> None:
    made = FakeBackend(
        script('[TOOL_CALLS] [{"name": "get_time", "arguments": {}}]'),
        tool_call_format="mistral",
        tool_call_token_ids=(("[TOOL_CALLS]", 5),),
    )
    client.backend.description, client.backend.steps = made.description, made.steps
    message = (await whole(client))["message"]
    assert re.fullmatch("[a-zA-Z0-9]{9}", message["tool_calls"][0]["id"])
    assert not client.backend.requests[0].sampling.skip_special_tokens


async def test_the_results_of_tools_reach_the_replica(client: Client) -> None:
    message = (await whole(client))["message"]
    first, second = (call["id"] for call in message["tool_calls"])
    messages = [
        *ASK["messages"],
        message,
        {"role": "tool", "tool_call_id": first, "content": "rain"},
        {"role": "tool", "tool_call_id": second, "content": [{"type": "text", "text": "noon"}]},
    ]
    client.backend.steps = HELLO
    await whole(client, messages=messages)
    assert client.backend.requests[-1].prompt == (
        ChatMessage("user", (TextPart("Weather?"),)),
        ChatMessage(
            "assistant",
            (TextPart("Let me look."),),
            (ToolCall(first, *CALLS[0]), ToolCall(second, *CALLS[1])),
        ),
        ChatMessage("tool", (TextPart("rain"),), (), first, "get_weather"),
        ChatMessage("tool", (TextPart("noon"),), (), second, "get_time"),
    )


def call(arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    function = {"name": "get_time", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function, **fields}


ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [call()]}
RETURNED = {"role": "tool", "tool_call_id": "c1", "content": "noon"}


@for_each(
    ([{"role": "assistant"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{**ASSISTANT, "role": "user", "content": "x"}], "messages[0].tool_calls"),
    ([{**ASSISTANT, "tool_calls": [call(id="")]}], "messages[0].tool_calls[0].id"),
    ([{**ASSISTANT, "tool_calls": [call(), call()]}], "messages[0].tool_calls[1].id"),
    ([{**ASSISTANT, "tool_calls": [call(kind=1)]}], "messages[0].tool_calls[0].kind"),
    ([RETURNED], "messages[0].tool_call_id"),
    ([ASSISTANT, {**RETURNED, "tool_call_id": "c2"}], "messages[1].tool_call_id"),
    ([ASSISTANT, {**RETURNED, "tool_call_id": None}], "messages[1].tool_call_id"),
    ([ASSISTANT, {**RETURNED, "role": "user"}], "messages[1].tool_call_id"),
)
async def test_inconsistent_messages_about_calls_are_refused_by_name(
    messages: list[Any], param: str, client: Client
) -> None:
    error = await client.refused(CHAT, {**ASK, "messages": messages})
    assert error["param"] == param
    assert not client.backend.requests


@for_each(
    ('{"zone": "UT', '"{\\"zone\\": \\"UT"'),
    ("{", '"{"'),
    ("[]", '"[]"'),
    ('"noon"', '"\\"noon\\""'),
    ('{"a": NaN}', '"{\\"a\\": NaN}"'),
    ('{"a":' * 65 + "1" + "}" * 65, json.dumps('{"a":' * 65 + "1" + "}" * 65)),
    ({"zone": "UTC"}, '{"zone": "UTC"}'),
    ('{"zone":"UTC"}', '{"zone":"UTC"}'),
    (None, "{}"),
)
async def test_an_earlier_call_s_arguments_are_taken_as_they_stand(
    arguments: Any, carried: str, client: Client
) -> None:
    messages = [{**ASSISTANT, "tool_calls": [call(arguments)]}, RETURNED]
    await whole(client, messages=messages)
    prompt = client.backend.requests[-1].prompt
    assert isinstance(prompt[0], ChatMessage)
    assert prompt[0].tool_calls == (ToolCall("c1", "get_time", carried),)


async def test_empty_arguments_become_an_empty_object(client: Client) -> None:
    messages = [{**ASSISTANT, "tool_calls": [call("", index=0)]}, RETURNED]
    await whole(client, messages=messages)
    prompt = client.backend.requests[0].prompt
    assert isinstance(prompt[0], ChatMessage)
    assert prompt[0].tool_calls == (ToolCall("c1", "get_time", "{}"),)
    assert prompt[0].parts == ()
