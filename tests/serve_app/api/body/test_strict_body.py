"""A body's JSON schema and the server agree on which bodies are valid.

Rules that the schema can't state are left out: `best_of` must equal n, the two limits of the
answer's length must agree, `overlap` must be less than `max_chars`, and token ids must be in the
vocabulary, which only the replica knows.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema_rs import Draft202012Validator
from pydantic import ValidationError

from deployments.contract.errors import RaystreamError
from deployments.contract.sampling_params import SamplingParams
from serve_app.api.body.strict_body import StrictBody
from serve_app.api.chat.schema import ChatRequest
from serve_app.api.classify.schema import ClassifyBody, SplitOptions, VllmClassifyBody
from serve_app.api.completions.schema import CompletionRequest
from serve_app.api.messages.schema import MessagesRequest, PromptFields
from serve_app.api.openai.sampling_schema import SamplingFields
from serve_app.api.responses.schema import ResponsesRequest
from serve_app.api.text_generation.schema import TextGenerationRequest
from serve_app.api.tokenize.schema import DetokenizeBody, TokenizeBody
from tests.offenders import for_each

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: list[tuple[type[StrictBody], dict[str, Any]]] = [
    (ChatRequest, {"model": "m", "messages": MESSAGES}),
    (CompletionRequest, {"model": "m", "prompt": "hi"}),
    (TextGenerationRequest, {"prompt": "hi"}),
    (MessagesRequest, {"model": "m", "messages": MESSAGES, "max_tokens": 5}),
    (ResponsesRequest, {"model": "m", "input": "hi"}),
    (PromptFields, {"model": "m", "messages": MESSAGES}),
    (TokenizeBody, {"prompt": "hi"}),
    (DetokenizeBody, {"tokens": [1]}),
    (ClassifyBody, {"input": "a"}),
    (VllmClassifyBody, {"input": ["a", "b"]}),
    (SplitOptions, {}),
]
BEYOND_A_SCHEMA = {"overlap", "best_of", "min_tokens", "max_tokens", "max_completion_tokens"}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NOTHING_OR_SOMETHING: list[Any] = [
    None, "", "a", 5, [], {}, {"a": [""]}, {"a": 0}, {"reasoning": "a"},
]  # fmt: skip
ARGUMENTS: list[Any] = [None, "{", {"a": 1}, 5, []]
FUNCTIONS = [{"name": "f", "arguments": arguments} for arguments in ARGUMENTS]
ECHOED = [
    "reasoning_content", "reasoning", "refusal", "provider_specific_fields", "cache_control",
    "parsed", "colour",
]  # fmt: skip
ECHOING = [
    {"role": role, "content": content, name: value}
    for role in ("user", "assistant")
    for content in ("a", None)
    for name in ECHOED
    for value in NOTHING_OR_SOMETHING
]
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 17, 20, 21, -1, -2, 2**31, 2**63, -(2**63) - 1, 0.5, -0.5, 2.5, 101,
    "", "a", "auto", "none", [], [""], ["a"], ["a"] * 17, [1], [-1], [0.5], [1] * 129, [[1]], [[]],
    ["a", 1], [1, "a"], [[1], "a"], {}, {"1": 1}, {"01": 1}, {"a": 1}, {"1": 101}, {"1": "a"},
    {"type": "text"}, {"include_usage": True}, {"continuous_usage_stats": True},
    {"include_usage": True, "continuous_usage_stats": True}, {"include_obfuscation": True},
    {"include_obfuscation": False}, MESSAGES, [{"role": "user"}],
    [{"role": "king", "content": "a"}], [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "user", "content": "a", "tool_calls": []}],
    [{"role": "user", "content": None}], [{"role": "user", "content": "a", "tool_calls": [CALL]}],
    [{"role": "assistant", "tool_calls": [CALL]}], [{"role": "assistant", "tool_calls": []}],
    [{"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}]}],
    [{"role": "assistant", "content": [], "tool_calls": [CALL]}],
    [{"role": "tool", "content": "a", "tool_call_id": "c"}], [{"role": "tool", "content": "a"}],
    [{"role": "tool", "content": "a", "tool_call_id": None}],
    [{"role": "user", "content": "a", "tool_call_id": "c"}],
    [{"role": "user", "content": "a", "tool_call_id": None}],
    [{"role": "assistant", "tool_calls": [{**CALL, "type": None, "caller": {}}]}],
    [{"role": "assistant", "tool_calls": [{**CALL, "caller": {"type": "direct"}}]}],
    [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}],
    *([{"role": "assistant", "tool_calls": [{"id": "c", "function": each}]}] for each in FUNCTIONS),
    *([each] for each in ECHOING),
    [TOOL], [{**TOOL, "type": "custom"}], [{"type": "function"}], [TOOL] * 600,
    "required", "function", {"type": "required"}, {"type": "function"},
    {"type": "none", "function": None},
    {"type": "function", "function": {"name": "f"}}, {"type": "auto", "function": {"name": "f"}},
    {"type": "json_object"}, {"type": "json_schema"}, "mean", "max", "right", {"max_chars": 5},
    {"max_chars": 0}, {"aggregate": "max"}, {"overlap": 1}, {"overlap": -1}, {"max_char": 5},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
    {"type": "json_schema", "json_schema": {"name": "", "schema": {}}},
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a", "detail": 1}}]}],
]  # fmt: skip


def accepts(body: type[StrictBody], value: dict[str, Any]) -> bool:
    try:
        read = body.model_validate(value)
        if isinstance(read, SamplingFields):
            read.to_sampling(SamplingParams())
    except (ValidationError, RaystreamError):
        return False
    return True


def fields_of(body: type[StrictBody]) -> list[str]:
    known = {*body.model_fields, *body.unsupported, *body.echoed, "zzzz"}
    return sorted(known - BEYOND_A_SCHEMA)


@pytest.mark.slow
@for_each(*BODIES)
def test_the_schema_and_the_server_agree_on_every_field(
    body: type[StrictBody], base: dict[str, Any]
) -> None:
    schema = Draft202012Validator(body.model_json_schema())
    for field in fields_of(body):
        for value in VALUES:
            changed = {**base, field: value}
            assert schema.is_valid(changed) == accepts(body, changed), (field, value)


@pytest.mark.slow
@pytest.mark.parametrize(("body", "base"), BODIES)
def test_the_schema_and_the_server_agree_on_fields_together(
    body: type[StrictBody], base: dict[str, Any]
) -> None:
    schema = Draft202012Validator(body.model_json_schema())

    @given(st.dictionaries(st.sampled_from(fields_of(body)), st.sampled_from(VALUES), max_size=4))
    @settings(max_examples=100)
    def agree(changes: dict[str, Any]) -> None:
        changed = {**base, **changes}
        assert schema.is_valid(changed) == accepts(body, changed)

    agree()


def test_a_schema_says_why_a_field_is_not_supported() -> None:
    suffix = CompletionRequest.model_json_schema()["properties"]["suffix"]
    assert suffix["enum"] == [None, ""]
    assert "fill a gap" in suffix["description"]
