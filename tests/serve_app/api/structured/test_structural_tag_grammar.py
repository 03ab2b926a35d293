"""Structural tags: which texts each format accepts, and what is refused."""

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import ValidationError

from deployments.contract.errors import InvalidRequestError
from deployments.contract.grammar.limits import MAX_ITEMS_OF_CLIENT_RULES, parser_limits
from serve_app.api.structured.answer_grammar import GrammarSettings
from serve_app.api.structured.structural_tag import MAX_NUM_FORMATS, StructuralTag
from serve_app.api.structured.structural_tag_grammar import structural_tag_grammar
from serve_app.config import LimitsConfig
from tests.offenders import for_each
from tests.serve_app.api.structured.accepting import takes

SETTINGS = GrammarSettings(LimitsConfig())
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
F = {"begin": "<f=one>", "content": CONTENT, "end": "</f>"}
G = {"begin": "<f=two>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</f>"}
ONE, TWO = '<f=one>{"n": 1}</f>', "<f=two>12</f>"
THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}


def triggered(**fields: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": [F, G], **fields}


def grammar_of(**fields: Any) -> str:
    tag = StructuralTag.model_validate({"type": "structural_tag", **fields})
    return structural_tag_grammar(tag, SETTINGS, "the.field").text


def separated(**fields: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [F, G], "separator": ",", **fields}


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "const_string", "value": "a/b\n"}, ["a/b\n"], ["", "a/b"]),
    (CONTENT, ['{"n": 1}'], ['{"n": 1, "m": 2}', "{}"]),
    ({"type": "regex", "pattern": "a|b"}, ["a", "b"], ["ab"]),
    ({"type": "grammar", "grammar": 'root ::= "x" | "y"'}, ["x", "y"], ["xy"]),
    ({"type": "any_text"}, ["", "a\nb"], []),
    ({"type": "or", "elements": [CONTENT, {"type": "const_string", "value": "no"}]},
     ['{"n": 2}', "no"], ["", "yes"]),
    ({"type": "sequence", "elements": [THINK, CONTENT]},
     ['<think>I</think>{"n": 1}'], ['<think>I{"n": 1}', '{"n": 1}']),
    ({"type": "sequence", "elements": [THINK, triggered()]},
     ["<think>I</think>Hm.", f"<think>{TWO}<f=</think>a{ONE}b{TWO}"], ["<think></think><f=x"]),
    ({"type": "sequence", "elements": [THINK, triggered(at_least_one=True, stop_after_first=True)]},
     [f"<think></think>{ONE}"], ["<think></think>", f"<think></think>{ONE}{ONE}"]),
    (triggered(), ["", "Hi", ONE, f"a{ONE}b{TWO}{ONE}c"], ["<f=", "<f=one>{}</f>", "a<f=3>"]),
    (triggered(at_least_one=True), [ONE, f"{TWO} and {ONE}"], ["", f"a{ONE}", f"{ONE}<f="]),
    (triggered(stop_after_first=True), ["", "Hi", f"Hi {ONE}"], [f"{ONE} a", "<f="]),
    (separated(), ["", ONE, f"{ONE},{TWO},{ONE}"], [f"{ONE}{TWO}", f"{ONE},", "a"]),
    (separated(at_least_one=True), [ONE], [""]),
    (separated(stop_after_first=True), ["", TWO], [f"{ONE},{TWO}"]),
    (
        {"type": "triggered_tags", "triggers": ["[A]", "[B]"], "tags": [
            {"begin": "[A]", "content": {"type": "any_text"}, "end": "[/A]"},
            {"begin": "[B]", "content": separated(at_least_one=True), "end": "[/B]"},
        ]},
        ["x[A]y[/A]z", f"[B]{ONE},{TWO}[/B][A][/A]"], ["[A]", f"[B]{ONE}", "[B][/B]"],
    ),
]  # fmt: skip


@pytest.mark.slow
@for_each(*range(len(CASES)))
def test_a_format_accepts_its_texts_and_no_others(at: int) -> None:
    format_, texts, others = CASES[at]
    grammar = grammar_of(format=format_)
    for text in texts:
        assert takes(grammar, text), text
    for text in others:
        assert not takes(grammar, text), text


def test_the_older_shape_is_text_with_triggered_tags() -> None:
    structures = [{"begin": "<f=one>", "schema": SCHEMA, "end": "</f>"}]
    grammar = grammar_of(structures=structures, triggers=["<f="])
    assert takes(grammar, f"a{ONE}b{ONE}")
    assert not takes(grammar, f"a{TWO}")


@for_each(
    ({}, "exactly one"),
    ({"structures": [{"begin": "<f", "schema": SCHEMA, "end": ""}]}, "triggers"),
    ({"structures": [{"begin": "<g", "schema": {}, "end": ""}], "triggers": ["<f"]}, "'<g'"),
    ({"format": triggered(triggers=["<g"])}, "'<f=one>'"),
    ({"format": {"type": "qwen_xml_parameter", "json_schema": {}}}, "qwen_xml_parameter"),
    ({"format": {"type": "any_text", "excludes": ["x"]}}, "excludes"),
    ({"format": {**CONTENT, "style": "qwen_xml"}}, "style"),
    ({"format": triggered(other=1)}, "other"),
)
def test_a_shape_that_is_not_supported_is_refused_by_name(
    fields: dict[str, Any], word: str
) -> None:
    with pytest.raises(ValidationError, match=word):
        StructuralTag.model_validate({"type": "structural_tag", **fields})


@for_each(
    ({"type": "sequence", "elements": [{"type": "any_text"}, CONTENT]}, "'any_text' stands"),
    ({"type": "sequence", "elements": [triggered(), CONTENT]}, "'triggered_tags' stands"),
    ({**THINK, "content": {"type": "regex", "pattern": "("}}, "unclosed group"),
    ({**THINK, "content": {"type": "grammar", "grammar": "start: x"}}, "unknown name"),
    ({**THINK, "begin": "x" * 70_000}, "max_schema_bytes"),
)
def test_a_tag_that_can_not_be_honoured_is_explained(format_: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word) as refused:
        grammar_of(format=format_)
    assert refused.value.param == "the.field"


def tag_of(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tag", "begin": "", "content": content, "end": ""}


X = {"type": "const_string", "value": "x"}
DOUBLED = separated(tags=[tag_of(separated(tags=[tag_of(X)], separator=""))], separator="")


@pytest.mark.slow
@pytest.mark.parametrize(
    "format_",
    [{"type": "grammar", "grammar": 'start: a\na: "x" | a a | a a a\n'}, DOUBLED],
    ids=["rules", "separated tags"],
)
def test_an_ambiguous_tag_ends_at_the_same_bound_as_a_client_s_rules(
    format_: dict[str, Any],
) -> None:
    grammar = grammar_of(format=format_)
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=parser_limits(grammar))
    for _ in range(2 * MAX_ITEMS_OF_CLIENT_RULES):
        matcher.compute_bitmask()
        if not matcher.consume_token(ord("x")):
            break
    assert f"max is {MAX_ITEMS_OF_CLIENT_RULES}" in matcher.get_error()


def test_formats_are_counted_before_they_are_validated() -> None:
    def spread(num: int) -> dict[str, Any]:
        groups = [{"type": "or", "elements": [X] * 100} for _ in range(num // 101)]
        return {"type": "sequence", "elements": [*groups, *[X] * (num % 101 - 1)]}

    StructuralTag.model_validate({"type": "structural_tag", "format": spread(MAX_NUM_FORMATS)})
    wrong = spread(MAX_NUM_FORMATS)
    wrong["elements"].append({"type": "no such format"})
    with pytest.raises(ValidationError, match=f"at most {MAX_NUM_FORMATS}") as refused:
        StructuralTag.model_validate({"type": "structural_tag", "format": wrong})
    assert refused.value.error_count() == 1
