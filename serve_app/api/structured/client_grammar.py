"""Grammars of what clients write themselves: regular expressions, choices, and rules.

Regular expressions are those of Rust, and the whole text has to match. Rules are in llguidance's
dialect of Lark, or in GBNF, llama.cpp's form.

Sources: https://docs.rs/regex/latest/regex/#syntax,
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md,
https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

import json
import re
from collections.abc import Sequence
from typing import Final

from llguidance import LLMatcher

from deployments.contract.grammar.limits import CLIENT_RULES
from deployments.contract.grammar.probe import translate_gbnf
from serve_app.api.structured.answer_grammar import (
    AnswerGrammar,
    GrammarSettings,
    Part,
    check_size,
    checked,
    refusal,
    serialized,
)
from serve_app.api.structured.fault_text import readable

REGEX: Final = "regular expression"
CHOICE: Final = "list of choices"
GRAMMAR: Final = "grammar"

REGEX_ADVICE: Final = (
    "Expressions are read as by Rust's regex crate (https://docs.rs/regex/latest/regex/#syntax), "
    "so there is no look-around and there are no back-references."
)
GRAMMAR_ADVICE: Final = (
    "Grammars are in llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance/blob/"
    "main/docs/syntax.md), with a rule named start, or in GBNF, with a rule named root."
)

_LARK_START = re.compile(r"[ \t]*(%llguidance\b|start[ \t]*(\[[^\]]*\])?[ \t]*:(?!:=))")
_RULE_OPTION = re.compile(
    r"^[ \t]*[\w.-]+[ \t]*\[(?:[^\]\n]*[ ,])?(temperature|stop|max_tokens)[ \t]*=", re.MULTILINE
)


def regex_grammar(pattern: str, settings: GrammarSettings, param: str) -> AnswerGrammar:
    """Return the grammar of the texts that a regular expression matches as a whole.

    Raises:
        InvalidRequestError: It is too large, is invalid, or takes too long to compile.
    """
    part = regex_part(pattern, "regex", settings, param)
    grammar = serialized("start: @regex\n", [part])
    return checked(grammar, settings, REGEX, param, REGEX_ADVICE)


def choice_grammar(choices: Sequence[str], settings: GrammarSettings, param: str) -> AnswerGrammar:
    """Return the grammar of the texts that equal one of the choices.

    Raises:
        InvalidRequestError: The choices are too large together, or take too long to compile.
    """
    check_size("".join(choices), settings, CHOICE, param)
    # One terminal: of separate ones, the shorter of two with the same beginning could win.
    texts = " | ".join(literal(choice) for choice in choices)
    grammar = serialized(f"start: CHOICE\nCHOICE: {texts}\n", [])
    return checked(grammar, settings, CHOICE, param)


def rules_grammar(rules: str, settings: GrammarSettings, param: str) -> AnswerGrammar:
    """Return the grammar of a client's rules.

    Raises:
        InvalidRequestError: They are too large, are invalid, ask for what is not honoured here, or
            take too long to compile.
    """
    grammar = serialized(f"start: @{CLIENT_RULES}\n", [rules_part(rules, "", settings, param)])
    return checked(grammar, settings, GRAMMAR, param, GRAMMAR_ADVICE)


def literal(text: str) -> str:
    """Return a terminal of Lark that matches only this text; an empty text gives none."""
    # As a regular expression, since strings of Lark can't hold every character.
    written = "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)
    return f"/{written}/" if text else ""


def regex_part(pattern: str, name: str, settings: GrammarSettings, param: str) -> Part:
    """Return a part of a grammar that matches a regular expression.

    Raises:
        InvalidRequestError: It is too large, or ends in a backslash.
    """
    check_size(pattern, settings, REGEX, param)
    # llguidance drops such a backslash.
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise refusal("it ends in a backslash that escapes nothing", REGEX, param, REGEX_ADVICE)
    (written,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return {"name": name, "lark_grammar": written["lark_grammar"]}


def rules_part(rules: str, suffix: str, settings: GrammarSettings, param: str) -> Part:
    """Return a client's rules as a part of a grammar, named `CLIENT_RULES` with a suffix.

    Raises:
        InvalidRequestError: They are too large, can't be translated, or ask for what is not
            honoured here.
    """
    check_size(rules, settings, GRAMMAR, param)
    if option := _RULE_OPTION.search(rules):
        why = f"the option {option[1]!r} of a rule is not supported"
        raise refusal(why, GRAMMAR, param, "Leave it out, or use 'suffix' or 'lazy'.")
    lark = _from_gbnf(rules, settings, param) if _is_gbnf(rules) else rules
    return {"name": CLIENT_RULES + suffix, "lark_grammar": lark}


def _is_gbnf(rules: str) -> bool:
    return "::=" in rules and not any(map(_LARK_START.match, rules.splitlines()))


def _from_gbnf(rules: str, settings: GrammarSettings, param: str) -> str:
    found = translate_gbnf(rules, settings.limits.max_schema_compile_s)
    if found.lark is None:
        why = readable(found.fault or "it is not GBNF")
        raise refusal(why, GRAMMAR, param, GRAMMAR_ADVICE)
    return found.lark
