from serve_app.api.structured.fault_text import MAX_LENGTH, readable
from tests.offenders import for_each

REGEX = """at 1(8): invalid regex "a(b" (in regex): regex parse error:
    a(b
     ^
error: unclosed group
   1 | start: /a(b/
              ^
"""
WORDS = """at 1(8): invalid regex "\\\\bx" (in regex): lookarounds not supported yet; \
WordUnicode in regex /\\bx/
   1 | start: /\\bx/
              ^
"""
RULE = """at 2(4): unknown name: "b"
   1 | start: a
   2 | a: b
          ^
"""
TOKEN = """at 1(8): unknown special token: "<|x|>"; following special tokens are available: <|tool|>
   1 | start: <|x|>
"""
ON_LINES = """regex parse error:
~~~~~~~~
1: a
2: [
   ^
~~~~~~~~
error: unclosed character class
"""


@for_each(
    (REGEX, "regex parse error: unclosed group, at character 2: a(b"),
    (WORDS, "word boundaries, and ^ or $ inside, are not supported in regex /\\bx/"),
    (RULE, 'line 2, column 4: unknown name: "b"'),
    (TOKEN, 'line 1, column 8: unknown special token: "<|x|>"'),
    (ON_LINES, "regex parse error: unclosed character class"),
    ("oneOf is not supported. Enable 'coerce_one_of' option", "oneOf is not supported"),
    ("lexer error: too many\n<non-verbose/>", "lexer error: too many"),
    ("", ""),
)
def test_a_fault_is_told_in_one_line(fault: str, told: str) -> None:
    assert readable(fault) == told


def test_a_long_expression_is_shown_around_its_fault() -> None:
    pattern = "x" * 300 + "(" + "y" * 300
    told = readable(f"regex parse error:\n    {pattern}\n    {' ' * 300}^\nerror: unclosed group\n")
    assert "at character 301: " in told
    assert "x(y" in told
    assert len(told) < 160


def test_a_message_is_bounded() -> None:
    assert len(readable("x" * 10_000)) == MAX_LENGTH
