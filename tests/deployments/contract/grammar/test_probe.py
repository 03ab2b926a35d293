"""Test-compiling a grammar in a subprocess."""

import pytest
from llguidance import LLMatcher

from deployments.contract.grammar.probe import EXCEEDED, IMPOSSIBLE, examine, translate_gbnf


def test_a_sound_grammar_has_no_fault() -> None:
    assert examine(LLMatcher.grammar_from_regex("[a-z]+"), 5).fault is None
    assert examine(LLMatcher.grammar_from_lark('start: "a" | "b" start'), 5).fault is None


@pytest.mark.parametrize("grammar", ["{", LLMatcher.grammar_from_lark("start: missing"), ""])
def test_a_fault_is_reported(grammar: str) -> None:
    assert examine(grammar, 5).fault


def test_a_grammar_that_allows_no_text_has_an_error_of_its_own() -> None:
    assert examine(LLMatcher.grammar_from_json_schema({"$ref": "#"}), 5).fault == IMPOSSIBLE


def test_the_result_is_cached() -> None:
    grammar = LLMatcher.grammar_from_regex("remembered")
    examine(grammar, 5)
    hits = examine.cache_info().hits
    examine(grammar, 5)
    assert examine.cache_info().hits == hits + 1


@pytest.mark.slow
def test_a_grammar_that_takes_too_long_is_refused() -> None:
    schema = {"allOf": [{"type": "integer", "multipleOf": m} for m in (97, 89, 83, 79)]}
    assert examine(LLMatcher.grammar_from_json_schema(schema), 1).fault == EXCEEDED


def test_what_a_lenient_grammar_leaves_out_is_reported() -> None:
    schema = {"type": "string", "format": "path", "x-guidance": {"lenient": True}}
    found = examine(LLMatcher.grammar_from_json_schema(schema), 5)
    assert found.fault is None
    assert found.warnings == ("Unknown format: path",)


def test_gbnf_becomes_lark() -> None:
    found = translate_gbnf('root ::= "a" b\nb ::= [0-9]+', 5)
    assert found.fault is None
    assert found.lark is not None
    assert examine(LLMatcher.grammar_from_lark(found.lark), 5).fault is None


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        ("root ::= missing", "missing"),
        ('rule ::= "a"', "root"),
        ('root ::= "a', "end of input"),
        ("root ::= " + "(" * 5_000, "deeply"),
    ],
)
def test_gbnf_that_is_invalid_is_reported(grammar: str, word: str) -> None:
    found = translate_gbnf(grammar, 5)
    assert found.lark is None
    assert word in (found.fault or "")


@pytest.mark.slow
def test_gbnf_that_takes_too_long_to_translate_is_refused() -> None:
    chain = "\n".join(f"r{i} ::= r{i + 1}" for i in range(12_000))
    assert translate_gbnf(f'root ::= r0\n{chain}\nr12000 ::= "a"', 1).fault == EXCEEDED
