"""A grammar that is tried out in a process of its own."""

import pytest
from llguidance import LLMatcher

from deployments.engine.grammar_probe import EXCEEDED, IMPOSSIBLE, find_fault


def test_a_sound_grammar_has_no_fault() -> None:
    assert find_fault(LLMatcher.grammar_from_regex("[a-z]+"), 5) is None
    assert find_fault(LLMatcher.grammar_from_lark('start: "a" | "b" start'), 5) is None


@pytest.mark.parametrize(
    "grammar",
    ["{", LLMatcher.grammar_from_lark("start: missing"), ""],
)
def test_a_fault_is_told_in_one_line(grammar: str) -> None:
    found = find_fault(grammar, 5)
    assert found
    assert "\n" not in found


def test_a_grammar_of_no_text_is_told_apart() -> None:
    assert find_fault(LLMatcher.grammar_from_json_schema({"$ref": "#"}), 5) == IMPOSSIBLE


def test_the_answer_is_remembered() -> None:
    grammar = LLMatcher.grammar_from_regex("remembered")
    find_fault(grammar, 5)
    hits = find_fault.cache_info().hits
    find_fault(grammar, 5)
    assert find_fault.cache_info().hits == hits + 1


def test_a_grammar_that_takes_too_long_is_given_up() -> None:
    schema = {"allOf": [{"type": "integer", "multipleOf": m} for m in (97, 89, 83, 79)]}
    assert find_fault(LLMatcher.grammar_from_json_schema(schema), 1) == EXCEEDED
