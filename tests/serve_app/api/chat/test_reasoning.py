"""Chat completions of a model that reasons, where its text is scripted."""

from dataclasses import replace
from typing import Any

import openai
import pytest

from deployments.contract.descriptions import ReasoningDescription
from deployments.contract.formats.reasoning_format import PromptReasoning
from deployments.contract.output import FinishReason, TextDelta, TokenLogprob, TokenLogprobs
from deployments.contract.sampling_params import ReasoningTokens
from serve_app.http.warning_header import WARNING_HEADER
from tests.offenders import for_each
from tests.serve_app.apps import AppClient, Client
from tests.serve_app.fakes import HELLO, FakeBackend, Step
from tests.serve_app.sse_decoder import events_of

CHAT = "/v1/chat/completions"
START, END = 501, 502
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Weather?"}]}
TOOLS = [{"type": "function", "function": {"name": "get_time"}}]
CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
MARKED = ("<think>", "\n", "Hm.", "\n", "Rain", "\n", "</think>", "\n\n")
ANSWER = ("It ", "rains", ".")


def script(*pieces: str, finish: FinishReason = FinishReason.STOP) -> list[Step]:
    """Return one token for each piece, and one without text at the end."""
    ids = {"<think>": START, "</think>": END}
    tokens = [(ids.get(piece, at), piece) for at, piece in enumerate((*pieces, ""))]
    deltas = [
        TextDelta(
            (token_id,),
            piece,
            logprobs=(TokenLogprobs(TokenLogprob(token_id, piece.encode(), -0.5), ()),),
        )
        for token_id, piece in tokens
    ]
    return [*([delta] for delta in deltas[:-1]), [replace(deltas[-1], finish_reason=finish)]]


def without_logprobs(steps: list[Step]) -> list[Step]:
    return [[replace(d, logprobs=()) for d in step] for step in steps if isinstance(step, list)]


@pytest.fixture
def backend() -> FakeBackend:
    backend = FakeBackend(without_logprobs(script(*MARKED, *ANSWER)), tool_call_format="hermes")
    backend.description = replace(
        backend.description,
        reasoning=ReasoningDescription("qwen3", ReasoningTokens(START, END)),
        template_parameters=("enable_thinking",),
    )
    return backend


async def whole(client: AppClient, **fields: Any) -> Any:
    return (await client.ask(CHAT, {**ASK, **fields})).json()


async def streamed(client: AppClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await client.ask(CHAT, {**ASK, "stream": True, **fields})
    *chunks, done = events_of(answer.content)
    assert done == "[DONE]"
    return list(chunks)


def told_in(chunks: list[dict[str, Any]], field: str) -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get(field) or "" for delta in deltas)


async def test_reasoning_is_separate_from_the_content(client: Client) -> None:
    told = await whole(client)
    message = told["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm.\nRain"
    assert message["content"] == "It rains."
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}
    assert told["usage"]["completion_tokens"] == 12


async def test_streamed_reasoning_is_that_of_the_whole_answer(client: Client) -> None:
    chunks = await streamed(client, stream_options={"include_usage": True})
    assert told_in(chunks, "reasoning_content") == "Hm.\nRain"
    assert told_in(chunks, "content") == "It rains."
    assert chunks[-1]["usage"] == (await whole(client))["usage"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert all(len(delta) == 1 for delta in deltas[1:-1])
    assert (deltas[0], deltas[-1]) == ({"role": "assistant", "content": ""}, {})
    order = [next(iter(delta)) for delta in deltas[1:-1]]
    assert order == sorted(order, reverse=True)


@for_each(
    *(
        (prompt, end)
        for prompt in (PromptReasoning.OPEN, PromptReasoning.BEGUN)
        for end in range(1, len(MARKED) + len(ANSWER) + 1)
    )
)
async def test_an_answer_cut_anywhere_never_holds_a_mark(
    prompt: PromptReasoning, end: int, client: Client
) -> None:
    client.backend.reasoning = prompt
    pieces = (*MARKED, *ANSWER)[prompt is PromptReasoning.BEGUN :][:end]
    client.backend.steps = without_logprobs(script(*pieces, finish=FinishReason.LENGTH))
    told = await whole(client)
    (choice,) = told["choices"]
    reasoning = choice["message"].get("reasoning_content", "")
    content = choice["message"]["content"]
    chunks = await streamed(client)
    assert (told_in(chunks, "reasoning_content"), told_in(chunks, "content")) == (
        reasoning,
        content or "",
    )
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert "Hm.\nRain".startswith(reasoning)
    assert "It rains.".startswith(content or "")
    assert content is None or content or not reasoning


async def test_an_answer_without_reasoning_has_no_field_for_it(client: Client) -> None:
    client.backend.steps = HELLO
    told = await whole(client)
    assert told["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hello, world!",
        "refusal": None,
    }
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert told_in(await streamed(client), "content") == "Hello, world!"


async def test_a_model_that_does_not_reason_keeps_marks_in_its_text(client: Client) -> None:
    client.backend.description = replace(client.backend.description, reasoning=None)
    told = await whole(client, include_reasoning=False)
    assert told["choices"][0]["message"]["content"] == "".join((*MARKED, *ANSWER))
    assert "completion_tokens_details" not in told["usage"]
    chunks = await streamed(client, stream_options={"include_usage": True})
    assert "completion_tokens_details" not in chunks[-1]["usage"]


async def test_the_client_may_leave_reasoning_out(client: Client) -> None:
    told = await whole(client, include_reasoning=False)
    assert "reasoning_content" not in told["choices"][0]["message"]
    assert told["choices"][0]["message"]["content"] == "It rains."
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}
    chunks = await streamed(client, include_reasoning=False)
    assert told_in(chunks, "reasoning_content") == ""
    assert told_in(chunks, "content") == "It rains."


async def test_tools_are_called_after_the_reasoning_and_never_within_it(client: Client) -> None:
    pieces = ("<think>", "\nI write ", CALL, "\n", "</think>", "\n\n", CALL)
    client.backend.steps = without_logprobs(script(*pieces))
    (choice,) = (await whole(client, tools=TOOLS))["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning_content"] == f"I write {CALL}"
    assert message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_time"]
    chunks = await streamed(client, tools=TOOLS)
    assert told_in(chunks, "reasoning_content") == f"I write {CALL}"
    assert told_in(chunks, "content") == ""
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    called = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert called[0]["name"] == "get_time"


@pytest.mark.parametrize("prompt", [PromptReasoning.OPEN, PromptReasoning.BEGUN])
@pytest.mark.parametrize("include_reasoning", [True, False])
async def test_every_token_that_the_client_gets_has_its_logprobs(
    client: Client, include_reasoning: bool, prompt: PromptReasoning
) -> None:
    client.backend.reasoning = prompt
    reasoning = MARKED[prompt is PromptReasoning.BEGUN :]
    answer = ("\n\n", *ANSWER)
    assert reasoning[-1] == answer[0]
    client.backend.steps = script(*reasoning, *ANSWER)
    fields = {"logprobs": True, "include_reasoning": include_reasoning}
    told = await whole(client, **fields)
    entries = told["choices"][0]["logprobs"]["content"]
    shown = (*reasoning[:-1], *answer) if include_reasoning else answer
    assert [entry["token"] for entry in entries] == [*shown, ""]
    chunks = await streamed(client, stream_options={"include_usage": True}, **fields)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]] == entries
    assert chunks[-1]["usage"] == told["usage"]
    details = told["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len(reasoning) - 1}


async def test_hidden_reasoning_sends_no_chunks(client: Client) -> None:
    client.backend.steps = script(*MARKED[:-2], finish=FinishReason.LENGTH)
    fields = {"logprobs": True, "include_reasoning": False}
    told = await whole(client, **fields)
    assert told["choices"][0]["logprobs"] == {"content": [], "refusal": None}
    chunks = [chunk["choices"][0] for chunk in await streamed(client, **fields)]
    assert [chunk["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]
    assert [chunk["logprobs"] for chunk in chunks] == [None, None]


async def test_each_of_several_answers_has_its_own_reasoning(client: Client) -> None:
    client.backend.scripts = [without_logprobs(script(*MARKED, *ANSWER)), HELLO]
    told = await whole(client, n=2)
    first, second = (choice["message"] for choice in told["choices"])
    assert (first["reasoning_content"], first["content"]) == ("Hm.\nRain", "It rains.")
    assert "reasoning_content" not in second
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}


@pytest.mark.parametrize(
    ("fields", "is_bound"),
    [
        ({"response_format": {"type": "json_object"}}, True),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({}, False),
    ],
)
async def test_a_grammar_holds_only_after_the_reasoning(
    client: Client, fields: dict[str, Any], is_bound: bool
) -> None:
    await whole(client, **fields)
    sampling = client.backend.requests[0].sampling
    assert (sampling.grammar is not None) == is_bound
    assert sampling.reasoning == (ReasoningTokens(START, END) if is_bound else None)
    assert sampling.skip_special_tokens


async def test_marks_that_are_special_tokens_are_kept_in_the_text(client: Client) -> None:
    described = ReasoningDescription("qwen3", ReasoningTokens(START, END), is_special=True)
    client.backend.description = replace(client.backend.description, reasoning=described)
    await whole(client)
    assert not client.backend.requests[0].sampling.skip_special_tokens


@pytest.mark.parametrize(
    ("fields", "parameters", "given"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, (), {"enable_thinking": False}),
        ({"reasoning_effort": "none"}, ("enable_thinking",), {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, ("enable_thinking",), {"enable_thinking": True}),
        ({"reasoning_effort": "low"}, ("reasoning_effort",), {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            ("enable_thinking",),
            {"enable_thinking": False},
        ),
        ({"reasoning_effort": "none"}, (), {}),
        ({"chat_template_kwargs": {}}, (), {}),
    ],
)
async def test_settings_reach_the_model_s_chat_template(
    client: Client, fields: dict[str, Any], parameters: tuple[str, ...], given: dict[str, Any]
) -> None:
    client.backend.description = replace(client.backend.description, template_parameters=parameters)
    await whole(client, **fields)
    assert dict(client.backend.requests[0].template_kwargs) == given


@pytest.mark.parametrize("reasons", [True, False])
@pytest.mark.parametrize("effort", ["none", "high"])
async def test_an_effort_that_the_template_can_not_use_is_named_in_the_warning_header(
    client: Client, effort: str, reasons: bool
) -> None:
    described = replace(client.backend.description, template_parameters=())
    client.backend.description = described if reasons else replace(described, reasoning=None)
    for stream in (False, True):
        body = {**ASK, "reasoning_effort": effort, "stream": stream}
        answer = await client.ask(CHAT, body)
        told = "reasoning_effort: the chat template of 'm' has no setting for reasoning"
        is_told = reasons or effort != "none"
        assert answer.headers.get(WARNING_HEADER) == (told if is_told else None)
    assert [request.template_kwargs for request in client.backend.requests] == [(), ()]


@for_each(
    {"x": []},
    {"x": {}},
    {"x": "a" * 1025},
    {"x": 1e7},
    {"x": -(10**30)},
    {"x" * 65: 1},
    {str(at): 1 for at in range(17)},
    [],
    "enable_thinking",
)
async def test_only_a_few_plain_values_may_reach_a_template(given: Any, client: Client) -> None:
    error = await client.refused(CHAT, {**ASK, "chat_template_kwargs": given})
    assert error["param"].startswith("chat_template_kwargs")
    assert not client.backend.requests


async def test_openai_s_client_reads_the_reasoning(openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.chat.completions.create(**ASK)
    message = answer.choices[0].message
    assert getattr(message, "reasoning_content", None) == "Hm.\nRain"
    details = answer.usage and answer.usage.completion_tokens_details
    assert details
    assert details.reasoning_tokens == 7
    stream = await openai_client.chat.completions.create(**ASK, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    told = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(told) == "Hm.\nRain"
