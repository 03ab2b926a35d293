r"""Patterns of ECMA-262 mean in a grammar what they mean in JavaScript.

The expected answers of the table are those of `new RegExp(pattern, "u").test(text)`, and without
the flag for what it refuses.
"""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from serve_app.api.structured.ecma_pattern import (
    BACK_REFERENCES,
    INNER_ANCHORS,
    LOOK_AROUND,
    MAX_NESTING,
    WORD_BOUNDARIES,
    InvalidPatternError,
    translated,
)
from tests.offenders import for_each

VOCABULARY = LLTokenizer("byte")


def matches(pattern: str, text: str) -> bool:
    """Return whether a grammar of the translated pattern accepts a text as a JSON string."""
    schema = {"type": "string", "pattern": translated(pattern).text}
    matcher = LLMatcher(VOCABULARY, LLMatcher.grammar_from_json_schema(schema), log_level=0)
    if matcher.is_error():
        assert "Unsatisfiable" in matcher.get_error(), matcher.get_error()
        return False
    token_ids = VOCABULARY.tokenize_str(json.dumps(text, ensure_ascii=False))
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@for_each(
    (r"^[^[]{2}$", ["ab", "]]"], ["a[", "a"]),
    (r"^[a[\]]$", ["a", "[", "]"], ["b"]),
    (r"^[\b]$", ["\b"], ["b"]),
    (r"^\cA\cz$", ["\x01\x1a"], ["cAcz"]),
    (r"^x{$", ["x{"], ["x"]),
    (r"^x{,2}]}$", ["x{,2}]}"], ["x]}"]),
    (r"^\ud83d\ude00$", ["😀"], ["\ufffd"]),
    (r"^[\ud83d\ude00-\ud83d\ude02]$", ["😀"], ["a"]),
    (r"^[\ud83c-\ud83d][\udc00-\udfff]$", ["😀"], ["a", "😀😀"]),
    (r"^[\ud800-\udbff][\udc00-\udfff]$", ["😀", "\U0010ffff"], ["a", "\uffff"]),
    (r"^[^\ud800-\udfff]$", ["a", "😀"], ["aa"]),
    (r"^[^]$", ["\n", "a", "😀"], ["", "aa"]),
    (r"^[]$", [], ["", "a"]),
    (r"^[a&&b]$", ["a", "&", "b"], ["c"]),
    (r"^[a~~b]$", ["a", "~", "b"], ["c"]),
    (r"^[+--]$", ["+", ",", "-"], ["."]),
    (r"^[\w-.]$", ["a", "-", "."], ["/"]),
    (r"^[[a]]$", ["[]", "a]"], ["a"]),
    (r"^.$", ["a", "😀"], ["\n", "\r", "\u2028"]),
    (r"^\s$", [" ", "\u00a0", "\ufeff", "\n"], ["\u0085", "a"]),
    (r"^\S$", ["\u0085", "a"], ["\ufeff"]),
    (r"^\d\w$", ["1_"], ["\u0661_", "1é"]),
    (r"^[^\W\d]$", ["a", "_"], ["1", "é"]),
    (r"^\x41\u0042\u{43}\0$", ["ABC\0"], ["ABC"]),
    (r"^\-\/\@\_$", ["-/@_"], ["\\-"]),
    (r"^\p{Lu}\P{L}[\p{Nd}x]$", ["É14", "A-x"], ["a14"]),
    (r"a|^b$", ["xax", "b"], ["xb"]),
    (r"(^a|b$)", ["ax", "xb"], ["xax"]),
    (r"^(^a)(b$)$", ["ab"], ["xab"]),
    (r"^$|^a$", ["", "a"], ["b"]),
    (r"a{2}", ["xaax"], ["a"]),
    (r"^a{1,}?b{0,4294967295}$", ["ab"], ["b"]),
    (r"^(?<n>a)$", ["a"], ["n"]),
    (r"^(?<stop>a)b$", ["ab"], ["a"]),
    (r"(?i)^é[a-c]$", ["ÉB"], ["ED"]),
    (r"^(?i:a)b$", ["Ab"], ["AB"]),
    (r"(?s)^.(?-s:.)$", ["\na"], ["a\n"]),
    (r"^(?P<y>\d)\pL\x{41}$", ["1éA"], ["1A"]),
    (r"\Aa\Z", ["a"], ["aa"]),
)  # fmt: skip
def test_a_pattern_matches_what_it_matches_in_javascript(
    pattern: str, whole: list[str], others: list[str]
) -> None:
    assert not translated(pattern).left_out
    assert [text for text in whole if not matches(pattern, text)] == []
    assert [text for text in others if matches(pattern, text)] == []


@for_each(
    (r"^(?=.*\d)(?!x)\w{3,}$", LOOK_AROUND, ["abc", "x1x"], ["a-c"]),
    (r"^a(?<=a)(?<!b)c$", LOOK_AROUND, ["ac"], ["bc"]),
    (r"^\bword\b$", WORD_BOUNDARIES, ["word"], ["words"]),
    (r"^a\B\B+$", WORD_BOUNDARIES, ["a"], ["b"]),
    (r"^(['\"])x\1$", BACK_REFERENCES, ["'x'", "'x and more"], ["x"]),
    (r"^(?<q>a)\k<q>(?P=q)$", BACK_REFERENCES, ["aaa"], ["baa"]),
    (r"^(?:^a)+b$", INNER_ANCHORS, ["ab", "aab"], ["b"]),
    (r"(?m)^a$", INNER_ANCHORS, ["b\na"], ["b"]),
)
def test_what_a_grammar_can_not_follow_is_left_out_and_the_rest_holds(
    pattern: str, name: str, whole: list[str], others: list[str]
) -> None:
    assert translated(pattern).left_out == {name}
    assert [text for text in whole if not matches(pattern, text)] == []
    assert [text for text in others if matches(pattern, text)] == []


@for_each(
    ("[a--c]", "a range that is out of order, at character 5"),
    ("(", "a group is not closed"),
    ("a)b", "a group is closed that is not open, at character 2"),
    ("[a", "a set is not closed"),
    ("*", "nothing can be repeated here, at character 1"),
    ("^*", "nothing can be repeated"),
    ("a**", "'a*' can't be repeated"),
    ("a++", "'a+' can't be repeated"),
    ("a{2,1}", "out of order"),
    ("a{4294967296}", "more repetitions than any answer has"),
    ("a\\", "a backslash that escapes nothing"),
    ("\\u{110000}", "a character beyond Unicode"),
    ("\\ud800", "half of a surrogate pair"),
    ("[\\ud800-\\udbff][\\udc00\\udc02]", "half of a surrogate pair"),
    ("(?>a)", "a group that ECMA-262 does not have"),
    ("(?x) a", "a group that ECMA-262 does not have"),
    ("(" * (MAX_NESTING + 1), "groups within groups"),
    ("(" * 60_000, "groups within groups"),
)
def test_an_invalid_pattern_is_explained(pattern: str, why: str) -> None:
    with pytest.raises(InvalidPatternError, match=re.escape(why)):
        translated(pattern)


# What means the same to Python's `re` as to ECMA-262.
PIECES = st.sampled_from(
    [
        "a",
        "b",
        "-",
        "&",
        "é",
        "😀",
        "\\.",
        "\\n",
        "[a-c]",
        "[^a]",
        "[&~]",
        "[^\\]]",
        "\\[",
        "#",
        "/",
    ]
)
PATTERNS = st.recursive(
    PIECES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda each: f"({'|'.join(each)})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,2}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        inner.map(lambda each: f"(^{each}|{each}$)"),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(PATTERNS, st.lists(st.text("ab-&~é😀.\n[]#/", max_size=4), min_size=1, max_size=5))
def test_any_pattern_matches_what_it_matches_in_python(pattern: str, texts: list[str]) -> None:
    is_held = not translated(pattern).left_out
    for text in texts:
        expected = re.search(pattern.replace("$", r"\Z"), text) is not None
        found = matches(pattern, text)
        assert found == expected if is_held else found >= expected


def test_a_long_pattern_is_read_in_time() -> None:
    pattern = "[a\\]" * 5_000 + "]" + "(?:a|[b)])*" * 4_000
    assert len(translated(pattern).text) > 20_000
