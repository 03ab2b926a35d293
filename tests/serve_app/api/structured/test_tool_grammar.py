import json
from typing import Any

import pytest
from llguidance import LLMatcher

from deployments.contract.descriptions import ModelDescription
from deployments.contract.errors import InvalidRequestError
from deployments.contract.formats.tool_call_format import (
    FORMATS,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    ToolCallFormat,
)
from deployments.contract.messages import Tool
from deployments.contract.sampling_params import SamplingParams
from serve_app.api.structured.answer_grammar import GrammarSettings
from serve_app.api.structured.json_schema_grammar import json_schema_grammar
from serve_app.api.structured.tool_grammar import OfferedFunction
from serve_app.api.tools.offer import ToolChoice, ToolOffer, make_offer
from serve_app.config import LimitsConfig
from tests.serve_app.api.structured.accepting import takes

SETTINGS = GrammarSettings(LimitsConfig())
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
IN_TEXT = {name: known for name, known in FORMATS.items() if not known.has_channels}
"""Formats whose calls are objects in the text; `test_channel_grammar` has the other one."""
ALL = pytest.mark.parametrize("known", IN_TEXT.values(), ids=IN_TEXT)


def function(name: str, schema: Any, *, is_strict: bool = False) -> OfferedFunction:
    return OfferedFunction(
        Tool(name, None, json.dumps(schema)), is_strict, "", f"tools[{name}].parameters"
    )


def offer(known: ToolCallFormat, *functions: OfferedFunction, **choice: Any) -> ToolOffer:
    model = ModelDescription(
        "m", 0, 128, False, SamplingParams(), accepts_tools=True, tool_call_format=known.name
    )
    return make_offer(functions, ToolChoice(**choice), model)


def guided(offer: ToolOffer, grammar: str | None = None) -> str:
    given = SamplingParams(grammar=grammar)
    assert offer.is_guiding(given)
    made = offer.guide(given, SETTINGS).sampling.grammar
    assert made is not None
    return made


def written(known: ToolCallFormat, *calls: tuple[str, str]) -> str:
    bodies = [
        f'{known.call[0]}{{"name": "{name}", "{known.arguments_key}": {arguments}}}{known.call[1]}'
        for name, arguments in calls
    ]
    return known.block[0] + known.separator.join(bodies) + known.block[1]


GET = function("get", CITY)
STRICT = function("get", CITY, is_strict=True)
OTHER = function("get_all", {})
ROME = ("get", '{"city": "Rome"}')


@ALL
def test_a_required_call_is_one_of_the_functions_and_nothing_else(known: ToolCallFormat) -> None:
    grammar = guided(offer(known, GET, OTHER, must_call=True))
    assert takes(grammar, written(known, ROME))
    assert takes(grammar, written(known, ROME, ("get_all", '{"x": [1]}'), ROME))
    assert not takes(grammar, written(known, ("get", '{"city": "Bonn"}')))
    assert not takes(grammar, written(known, ("get", "{}")))
    assert not takes(grammar, written(known, ("other", "{}")))
    assert not takes(grammar, "Hello" + written(known, ROME))
    assert not takes(grammar, "")


@ALL
def test_no_more_calls_than_the_maximum_are_forced(known: ToolCallFormat) -> None:
    grammar = guided(offer(known, GET, OTHER, must_call=True, is_parallel=False))
    assert takes(grammar, written(known, ROME))
    assert not takes(grammar, written(known, ROME, ROME))
    grammar = guided(offer(known, GET, must_call=True))
    assert takes(grammar, written(known, *[ROME] * 16))
    assert not takes(grammar, written(known, *[ROME] * 17))


@ALL
def test_a_named_function_is_called_once(known: ToolCallFormat) -> None:
    grammar = guided(
        offer(known, GET, OTHER, must_call=True, names=frozenset({"get_all"}), is_parallel=False)
    )
    assert takes(grammar, written(known, ("get_all", "{}")))
    assert not takes(grammar, written(known, ROME))
    assert not takes(grammar, written(known, ("get_all", "{}"), ("get_all", "{}")))


@ALL
def test_a_strict_function_is_called_by_its_schema_or_not_at_all(known: ToolCallFormat) -> None:
    grammar = guided(offer(known, STRICT, OTHER))
    assert takes(grammar, "")
    assert takes(grammar, "It <b>rains</b> [1].")
    assert takes(grammar, written(known, ROME))
    assert takes(grammar, written(known, ("get_all", '{"x": 1}'), ROME))
    bad = written(known, ("get", '{"city": "Bonn"}'))
    assert not takes(grammar, bad)
    if not known.only_at_start:
        assert takes(grammar, "Let me look. " + written(known, ROME) + " There.")
        assert not takes(grammar, "Let me look. " + bad)


@ALL
def test_without_strict_functions_there_is_no_grammar(known: ToolCallFormat) -> None:
    assert not offer(known, GET, OTHER).is_guiding(SamplingParams())


@pytest.mark.parametrize("known", [HERMES, MISTRAL], ids=lambda known: known.name)
def test_with_a_response_format_an_answer_is_calls_or_valid_by_the_format(
    known: ToolCallFormat,
) -> None:
    answer = json_schema_grammar(
        {"type": "object", "properties": {"a": {"const": 1}}}, SETTINGS
    ).text
    grammar = guided(offer(known, GET), answer)
    assert takes(grammar, '{"a": 1}')
    assert takes(grammar, written(known, ROME, ROME))
    assert not takes(grammar, '{"a": 2}')
    assert not takes(grammar, "Hello")


def test_a_format_without_marks_does_not_combine_with_a_response_format() -> None:
    answer = json_schema_grammar({"type": "object"}, SETTINGS).text
    with pytest.raises(InvalidRequestError) as caught:
        guided(offer(LLAMA3_JSON, GET), answer)
    assert caught.value.param == "response_format"
    assert takes(
        guided(offer(LLAMA3_JSON, GET, must_call=True), answer), written(LLAMA3_JSON, ROME)
    )


def test_a_mark_that_is_a_special_token_is_written_by_its_id() -> None:
    model = ModelDescription(
        "m", 0, 128, False, SamplingParams(), accepts_tools=True,
        tool_call_format="mistral", tool_call_token_ids=(("[TOOL_CALLS]", 5),),
    )  # fmt: skip
    for choice, functions in ((ToolChoice(must_call=True), [GET]), (ToolChoice(), [STRICT])):
        made = make_offer(functions, choice, model).guide(SamplingParams(), SETTINGS).sampling
        assert made.grammar is not None
        rules = json.loads(made.grammar)["grammars"][0]["lark_grammar"]
        assert "<[5]>" in rules
        assert "TOOL_CALLS" not in rules
        assert '""' not in rules
        assert not made.skip_special_tokens
        assert LLMatcher.validate_grammar(made.grammar) == ""


def test_an_unsupported_keyword_is_refused_only_in_a_strict_function() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    lenient = guided(offer(HERMES, function("f", schema), must_call=True))
    assert takes(lenient, written(HERMES, ("f", '{"a": [1]}')))
    with pytest.raises(InvalidRequestError, match="uniqueItems") as caught:
        guided(offer(HERMES, OTHER, GET, function("f", schema, is_strict=True)))
    assert caught.value.param == "tools[f].parameters"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#/$defs/none"}}},
        {"properties": {"a": {"type": "text"}}},
        {"properties": {"a": {"$ref": "http://127.0.0.1/schema.json"}}},
        {"x-guidance": {"lenient": True}},
    ],
)
def test_the_function_whose_schema_is_broken_is_named(schema: Any) -> None:
    functions = [GET, OTHER, function("broken", schema), function("last", {})]
    with pytest.raises(InvalidRequestError) as caught:
        guided(offer(HERMES, *functions, must_call=True))
    assert caught.value.param == "tools[broken].parameters"
