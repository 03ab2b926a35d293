"""Turns a client's JSON schema into a grammar that the engine follows.

Every text that a strict grammar accepts is JSON that is valid by the schema, so a keyword that
can't be honoured is refused by name. A lenient grammar leaves such keywords out and names them. A
schema that is too large or takes too long to compile is refused.

The JSON is compact, except that a single space is allowed wherever JSON allows white space. If any
amount were allowed, small models would write long runs of white space.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from serve_app.api.structured.answer_grammar import (
    AnswerGrammar,
    GrammarSettings,
    check_depth,
    check_size,
    checked,
    refusal,
    serialized,
)
from serve_app.api.structured.closed_schema import closed
from serve_app.api.structured.schema_walk import Schema, rebuilt

ANY_OBJECT: Final[Mapping[str, object]] = {"type": "object"}
OPTIONS: Final = "x-guidance"
"""The key of a schema from which llguidance reads its options."""

WHAT: Final = "JSON schema"
WHITE_SPACE: Final = "regular expression of white space"
COMPACT: Final = "[ ]?"
NOT_STRICT: Final = (
    "Without strict: true, what can't be enforced is left out and named in a header."
)

UNHELD_PATTERN: Final = "pattern with look-around or a back-reference"
MAX_PATTERN_LENGTH: Final = 1_000
"""Longer patterns are left to llguidance: finding look-around in them would take too long."""

# Escapes, classes of characters, the openings of groups with look-around, and anything else.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:[=!]|<[=!])|.", re.DOTALL)
_UNHELD_PIECE = re.compile(r"\(\?<?[=!]|\\[bB1-9k]")


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """How JSON is written, and what a schema that says nothing about it allows.

    Attributes:
        is_strict: Whether a keyword that can't be honoured is refused, not left out.
        white_space: The regular expression of what may stand where JSON allows white space; empty
            for nothing.
        closes_objects: Whether objects that list properties have no others; None: as the operator
            has set it.
    """

    is_strict: bool = False
    white_space: str = COMPACT
    closes_objects: bool | None = None


STRICT: Final = JsonStyle(is_strict=True)
LENIENT: Final = JsonStyle()


def json_schema_grammar(
    schema: Mapping[str, object],
    settings: GrammarSettings,
    param: str = "response_format",
    style: JsonStyle = STRICT,
) -> AnswerGrammar:
    """Return the grammar of the JSON texts that are valid by a schema.

    This may take up to `limits.max_schema_compile_s`, so call it in a `schema_executor`.

    Args:
        schema: A JSON schema; llguidance supports only a part of the standard.
        settings: The bounds on its size, depth and compile time.
        param: The request's field that holds the schema.
        style: How the JSON is written.

    Raises:
        InvalidRequestError: The schema is too large or can't be honoured.
    """
    bound = constrained_schema(schema, settings, param, style)
    grammar = serialized("start: @json\n", [{"name": "json", "json_schema": bound.schema}])
    advice = NOT_STRICT if style.is_strict else ""
    found = checked(grammar, settings, WHAT, param, advice)
    return AnswerGrammar(found.text, (*bound.unheld, *found.unheld))


@dataclass(frozen=True, slots=True)
class ConstrainedSchema:
    """A schema with our options.

    Attributes:
        schema: Fit for a part of a grammar.
        unheld: What was left out of it already.
    """

    schema: Mapping[str, Any]
    unheld: tuple[str, ...] = ()


def constrained_schema(
    schema: Mapping[str, object], settings: GrammarSettings, param: str, style: JsonStyle
) -> ConstrainedSchema:
    """Return a schema with our options, fit for a part of a grammar.

    Raises:
        InvalidRequestError: The schema, or the expression of white space, is too large.
    """
    if OPTIONS in schema:
        raise refusal(f"{OPTIONS} is not accepted", WHAT, param)
    check_depth(schema, settings, WHAT, param)
    check_size(json.dumps(schema), settings, WHAT, param)
    check_size(style.white_space, settings, WHITE_SPACE, param)
    closes = settings.closes_objects if style.closes_objects is None else style.closes_objects
    options = {
        "whitespace_flexible": False,
        **({"whitespace_pattern": style.white_space} if style.white_space else {}),
        "lenient": not style.is_strict,
    }
    held, unheld = (schema, ()) if style.is_strict else _without_unheld_patterns(schema)
    return ConstrainedSchema({**(closed(held) if closes else held), OPTIONS: options}, unheld)


def _without_unheld_patterns(schema: Mapping[str, object]) -> tuple[Schema, tuple[str, ...]]:
    """Return the schema without patterns that llguidance would refuse, and what was left out."""
    unheld: set[str] = set()

    def change(_: Schema, made: dict[str, Any]) -> dict[str, Any]:
        pattern = made.get("pattern")
        if isinstance(pattern, str) and _looks_around(pattern):
            unheld.add(UNHELD_PATTERN)
            del made["pattern"]
        return made

    return rebuilt(schema, change), tuple(unheld)


def _looks_around(pattern: str) -> bool:
    if len(pattern) > MAX_PATTERN_LENGTH:
        return False
    return any(_UNHELD_PIECE.fullmatch(piece) for piece in _PIECE.findall(pattern))
