"""Chat completions of a model that writes messages on channels, where its text is scripted."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from deployments.contract.descriptions import ReasoningDescription
from deployments.contract.formats.tool_call_format import OPENAI
from deployments.contract.output import FinishReason
from deployments.contract.sampling_params import ReasoningTokens
from deployments.engine.grammar.matcher import GrammarCompiler
from serve_app.http.warning_header import WARNING_HEADER
from tests.engine.tiny_models import EOS_TOKEN_ID, byte_tokenizer
from tests.offenders import every
from tests.serve_app.api.chat import test_reasoning
from tests.serve_app.api.chat.test_reasoning import ASK, streamed, told_in, whole, without_logprobs
from tests.serve_app.apps import Client
from tests.serve_app.fakes import FakeBackend, Step

CHANNEL, END, ANALYSIS = 601, 602, 603
IDS = {"<|channel|>": CHANNEL, "<|end|>": END, "analysis": ANALYSIS}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
HM = ("<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>")
NEXT = ("<|start|>", "assistant")
RAIN = ("<|channel|>", "final", "<|message|>", "It ", "rains", ".")
ROME = '{"city": "Rome"}'
CALL = (" to", "=functions.get", "<|channel|>", "commentary", " json", "<|message|>", *ROME)
SCHEMA = {"enum": ["red", "green"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "color", "schema": SCHEMA}}


def script(*pieces: str, finish: FinishReason = FinishReason.STOP) -> list[Step]:
    return with_ids(without_logprobs(test_reasoning.script(*pieces, finish=finish)), pieces)


def with_ids(steps: list[Step], pieces: tuple[str, ...]) -> list[Step]:
    """Return steps with the ids of the marks."""
    ids = [IDS.get(piece, at) for at, piece in enumerate((*pieces, ""))]
    return [
        [replace(delta, token_ids=(token_id,)) for delta in step]
        for step, token_id in zip(steps, ids, strict=True)
        if isinstance(step, list)
    ]


@pytest.fixture(name="marks")
def mark_ids() -> Mapping[str, int]:
    return ids_of_marks()


def ids_of_marks() -> Mapping[str, int]:
    """Return the ids of the marks in a tokenizer of bytes."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(OPENAI.marks)})
    ids = tokenizer.convert_tokens_to_ids(list(OPENAI.marks))
    assert isinstance(ids, list)
    return dict(zip(OPENAI.marks, ids, strict=True))


@pytest.fixture
def backend(marks: Mapping[str, int]) -> FakeBackend:
    backend = FakeBackend(
        script(*HM, *NEXT, *RAIN),
        tool_call_format="openai",
        tool_call_token_ids=tuple(marks.items()),
    )
    tokens = ReasoningTokens(CHANNEL, END, channel=ANALYSIS)
    reasoning = ReasoningDescription("openai_gptoss", tokens, is_special=True)
    backend.description = replace(backend.description, reasoning=reasoning)
    return backend


async def test_channels_become_reasoning_and_content(client: Client) -> None:
    told = await whole(client)
    message = told["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "It rains.")
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    chunks = await streamed(client)
    assert told_in(chunks, "reasoning_content") == "Hm."
    assert told_in(chunks, "content") == "It rains."
    assert not client.backend.requests[0].sampling.skip_special_tokens


async def test_a_message_to_a_function_becomes_a_call(client: Client) -> None:
    client.backend.steps = script(*HM, *NEXT, *CALL)
    told = await whole(client, tools=TOOLS)
    (choice,) = told["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get", "arguments": ROME}
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["finish_reason"] == "tool_calls"
    chunks = await streamed(client, tools=TOOLS)
    parts = [
        part
        for c in chunks
        for choice in c["choices"]
        for part in choice["delta"].get("tool_calls") or ()
    ]
    assert "".join(part["function"].get("arguments") or "" for part in parts) == ROME
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_an_answer_at_once_has_no_reasoning(client: Client) -> None:
    client.backend.steps = script(*RAIN)
    told = await whole(client)
    assert told["choices"][0]["message"] == {
        "role": "assistant",
        "content": "It rains.",
        "refusal": None,
    }
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_reasoning_may_be_left_out(client: Client) -> None:
    message = (await whole(client, include_reasoning=False))["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"] == "It rains."


async def test_all_reasoning_is_counted_and_none_of_it_has_log_probabilities_where_it_is_hidden(
    client: Client,
) -> None:
    remark = ("<|channel|>", "commentary", "<|message|>", "I look.", "<|end|>")
    pieces = (*HM, *NEXT, *remark, *NEXT, *HM, *NEXT, *RAIN)
    client.backend.steps = with_ids(test_reasoning.script(*pieces), pieces)
    hidden = {"include_reasoning": False, "logprobs": True}
    told = await whole(client, **hidden)
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * len(HM)}
    entries = told["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [*NEXT, *remark, *NEXT, *NEXT, *RAIN, ""]
    chunks = await streamed(client, **hidden)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    parts = [choice["logprobs"]["content"] for choice in choices if choice.get("logprobs")]
    assert [entry for part in parts for entry in part] == entries


def tokens_of(text: str, marks: Mapping[str, int]) -> list[int]:
    """Return the tokens of a text whose marks are special tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def takes(grammar: str | None, text: str, marks: Mapping[str, int]) -> bool:
    """Return whether a grammar accepts a text as complete."""
    assert grammar is not None
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    matcher = GrammarCompiler(tokenizer, len(tokenizer), {EOS_TOKEN_ID}).compile(grammar)
    for token_id in tokens_of(text, marks):
        matcher.advance(token_id)
        if matcher.error is not None:
            return False
    word, bit = divmod(EOS_TOKEN_ID, 32)
    mask = matcher.bitmask().flatten()
    return bool(int(mask[word]) >> bit & 1) or not bool(mask.any())


THOUGHT = "".join((*HM, *NEXT))
FINAL = "<|channel|>final<|message|>"
CALLS = (
    "".join(CALL),
    f"<|channel|>commentary to=functions.get <|constrain|>json<|message|>{ROME}",
)


async def test_a_schema_binds_the_final_message_after_any_reasoning(
    client: Client, marks: Mapping[str, int]
) -> None:
    await whole(client, response_format=FORMAT)
    sampling = client.backend.requests[0].sampling
    assert sampling.reasoning is None
    for case in every(
        [
            (f'{FINAL}"red"', True),
            (f'{THOUGHT}{FINAL}"green"', True),
            (f'{THOUGHT}{THOUGHT}{FINAL}"green"', True),
            (f"{FINAL}red", False),
            ('"red"', False),
            (THOUGHT, False),
        ]
    ):
        with case as (text, is_taken):
            assert takes(sampling.grammar, text, marks) == is_taken


async def test_a_required_call_comes_after_any_reasoning(
    client: Client, marks: Mapping[str, int]
) -> None:
    client.backend.steps = script(*CALL)
    await whole(client, tools=TOOLS, tool_choice="required")
    grammar = client.backend.requests[0].sampling.grammar
    for case in every(
        [
            *((call, True) for call in CALLS),
            *((THOUGHT + call, True) for call in CALLS),
            *((call.replace("Rome", "Bonn"), False) for call in CALLS),
            (f"{FINAL}Rome", False),
        ]
    ):
        with case as (text, is_taken):
            assert takes(grammar, text, marks) == is_taken


@pytest.mark.parametrize("has_format", [False, True])
async def test_a_strict_function_is_called_by_its_schema_or_not_at_all(
    client: Client, marks: Mapping[str, int], has_format: bool
) -> None:
    tool = {**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}
    fields = {"response_format": FORMAT} if has_format else {}
    await whole(client, tools=[tool], **fields)
    grammar = client.backend.requests[0].sampling.grammar
    remark = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    for case in every(
        [
            *((THOUGHT + remark + call, True) for call in CALLS),
            *((call.replace("Rome", "Bonn"), False) for call in CALLS),
            (f'{FINAL}"red"', True),
            (f"{FINAL}It rains.", not has_format),
        ]
    ):
        with case as (text, is_taken):
            assert takes(grammar, text, marks) == is_taken


async def test_a_budget_of_reasoning_binds_unless_a_grammar_does_and_then_a_warning_says_so(
    client: Client,
) -> None:
    ask: dict[str, Any] = {
        "model": "m",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "Weather?"}],
        "thinking": {"type": "enabled", "budget_tokens": 5},
    }
    answer = await client.ask("/v1/messages", ask)
    assert WARNING_HEADER not in answer.headers
    sampling = client.backend.requests[0].sampling
    assert sampling.reasoning == ReasoningTokens(CHANNEL, END, max_tokens=5, channel=ANALYSIS)
    ask["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = await client.ask("/v1/messages", ask)
    assert answer.headers[WARNING_HEADER].startswith("Not enforced: thinking.budget_tokens")
    assert client.backend.requests[1].sampling.reasoning is None


async def test_a_schema_needs_the_ids_of_the_marks(client: Client) -> None:
    client.backend.description = replace(client.backend.description, tool_call_token_ids=())
    told = await client.ask("/v1/chat/completions", {**ASK, "response_format": FORMAT}, 400)
    assert "tool_call_parser: openai" in json.dumps(told.json())
