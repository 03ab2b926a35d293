"""Regular expressions, choices and rules of clients: what they accept, and which are refused."""

from typing import Any

import pytest

from deployments.contract.errors import InvalidRequestError
from serve_app.api.structured.answer_grammar import GrammarSettings
from serve_app.api.structured.client_grammar import choice_grammar, regex_grammar, rules_grammar
from serve_app.config import LimitsConfig
from tests.offenders import for_each
from tests.serve_app.api.structured.accepting import takes

SETTINGS = GrammarSettings(LimitsConfig())


def refusal(make: Any, source: Any, settings: GrammarSettings = SETTINGS) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        make(source, settings, "the.field")
    assert refused.value.param == "the.field"
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 1_000
    return refused.value.message


@for_each(
    ("[a-c]{2}", ["ab"], ["a", "abc", "xab"]),
    ("^a|b$", ["a", "b"], ["ab"]),
    ("a/b\\/c", ["a/b/c"], []),
    ("a\\\\/b", ["a\\/b"], ["a/b"]),
    ('say "x"\n# no comment', ['say "x"\n# no comment'], []),
    ("(?s).", ["\n"], [""]),
    ("", [""], ["a"]),
)
def test_a_regular_expression_matches_the_whole_text(
    pattern: str, whole: list[str], others: list[str]
) -> None:
    grammar = regex_grammar(pattern, SETTINGS, "regex").text
    assert all(takes(grammar, text) for text in whole)
    assert not any(takes(grammar, text) for text in others)


@for_each(
    ("a(b", "unclosed group, at character 2: a(b"),
    ("(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
    ("(a)\\1", "backreferences are not supported, at character 4"),
    ("x\n[a", "unclosed character class"),
    ("\\bword", "word boundaries"),
    ("a\\", "backslash that escapes nothing"),
    ("[^\\x00-\\x{10FFFF}]", "nothing may follow"),
    ("x" * 70_000, "limits.max_schema_bytes"),
)
def test_a_regular_expression_that_is_refused_is_explained(pattern: str, word: str) -> None:
    assert word in refusal(regex_grammar, pattern)


def test_an_error_says_how_regular_expressions_are_read() -> None:
    assert "Rust" in refusal(regex_grammar, "(")


def test_choices_are_exact() -> None:
    choices = ["yes", "yes, but", "nö\n", "a/b\\", '"]', "\x01\x7f\u2028😀", " "]
    grammar = choice_grammar(choices, SETTINGS, "choice").text
    assert all(takes(grammar, choice) for choice in choices)
    for other in ("", "ye", "yes,", "yes, butyes", "nö", "no", "a/b", "\x01\x7f\u2028", "  "):
        assert not takes(grammar, other), other


def test_choices_are_bounded_together() -> None:
    assert "max_schema_bytes" in refusal(choice_grammar, ["x" * 40_000, "y" * 40_000])


def test_rules_in_lark_are_followed() -> None:
    rules = 'start: "f(" (arg ("," arg)*)? ")"\narg: NAME | start\nNAME: /[a-z]+/ // name\n'
    grammar = rules_grammar(rules, SETTINGS, "grammar").text
    assert takes(grammar, "f(a,f(b))")
    assert not takes(grammar, "f(a")


def test_rules_in_gbnf_are_followed() -> None:
    rules = 'root ::= "is " adjective ("!" | ".")?\n\nadjective ::= [a-z]+ # one word\n'
    grammar = rules_grammar(rules, SETTINGS, "grammar").text
    assert takes(grammar, "is fast!")
    assert not takes(grammar, "is Fast")


@pytest.mark.parametrize(
    "rules",
    [
        'start: "<[65]>"',
        "start: /<\\[65\\]>/ // <[65]>",
        'start: %json {"const": "<[65]>"}  # <[65]>',
    ],
)
def test_text_and_comments_may_look_like_token_ids(rules: str) -> None:
    quote = '"' if "json" in rules else ""
    assert takes(rules_grammar(rules, SETTINGS, "grammar").text, f"{quote}<[65]>{quote}")


def test_rules_that_write_rules_are_taken_for_lark() -> None:
    rules = 'start: NAME "::=" NAME\nNAME: /[a-z]+/'
    assert takes(rules_grammar(rules, SETTINGS, "grammar").text, "a::=b")


@for_each(
    ("start: missing", 'line 1, column 8: unknown name: "missing"'),
    ('start: a\na: "x', "line 2, column"),
    ("start: /a(/", "unclosed group, at character 2: a("),
    ('x: "a"', "no start rule found"),
    ("root ::= missing", "'missing' not found"),
    ('start: a\na[temperature=0.5]: "x"', "'temperature'"),
    ('start: a\na[lazy, stop="x"]: /.*/', "'stop'"),
    ("start: @json", "json"),
    ('start: "x" <|im_end|>', "unknown special token"),
    ('start: "x" <[65]>', "names token ids (<[...]>)"),
    ("start: <[1000000]>", "names token ids (<[...]>)"),
    ("start: a+\na: <[^1-3,7]>", "names token ids (<[...]>)"),
    ("start: start", "nothing may follow"),
    ('start: %json {"type": "nope"}', "nope"),
    ("start: " + "(" * 30_000, "deeply nested"),
)
def test_rules_that_are_refused_are_explained(rules: str, word: str) -> None:
    message = refusal(rules_grammar, rules)
    assert word in message
    assert "available" not in message, "the vocabulary of the test compilation is not the model's"


def test_a_client_s_rules_can_not_change_the_options() -> None:
    # With forcing, the first mask would follow a million letters to their end.
    rules = '%llguidance {"no_forcing": false}\nstart: /b{40}(a{1000}){1000}/'
    grammar = rules_grammar(rules, SETTINGS, "grammar").text
    assert not takes(grammar, "b" * 40 + "a" * 2_000)


@for_each(
    (regex_grammar, "(([ab]{0,1000}){0,1000}){0,1000}", "too many expressions"),
    (regex_grammar, "(" * 20_000 + "a" + ")" * 20_000, "nest"),
    (rules_grammar, 'start: a{1,200}\na: a a a | "x" | ', "max is 1000"),
    (rules_grammar, "start: " + " ".join(f'("k{i}")?' for i in range(3_000)), "max is 1000"),
    (rules_grammar, "start: A\nA: /(?s:.*)a.{400}/ & /(?s:.*)b.{400}/", "fuel exhausted"),
)
def test_an_expensive_grammar_is_refused(make: Any, source: str, word: str) -> None:
    assert word in refusal(make, source)
