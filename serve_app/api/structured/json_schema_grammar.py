"""Turns a client's JSON schema into a grammar that the engine follows.

Every text that a strict grammar accepts is JSON that is valid by the schema, so a keyword that
can't be honoured is refused by name. A lenient grammar leaves such keywords out and names them, or
those parts of their values that can't be held (see `held_schema`). A schema that is too large or
takes too long to compile is refused.

The JSON is compact, except that a single space is allowed wherever JSON allows white space. If any
amount were allowed, small models would write long runs of white space.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from deployments.contract.grammar.probe import Finding, examine
from serve_app.api.structured.answer_grammar import (
    AnswerGrammar,
    GrammarSettings,
    check_depth,
    check_size,
    refusal,
    serialized,
)
from serve_app.api.structured.closed_schema import closed
from serve_app.api.structured.fault_text import readable
from serve_app.api.structured.held_schema import SchemaHolder, open_names
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

MAX_NUM_EXAMINED: Final = 8
"""Most parts of one schema that are compiled by themselves to find what can't be."""

MAX_NUM_RELIEVED: Final = 4
"""Most schemas of one request whose parts are: few compilations run at the same time."""

_STRING_KEYWORDS: Final = ("pattern", "format", "minLength", "maxLength")
_TOO_MUCH: Final = (("format",), ("pattern",), ("format", "pattern"))
"""What is left out of a string's schema that can't be compiled; the first that helps."""
_NAMES_BY_PATTERN: Final = "patternProperties"


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

    def compiled(bound: ConstrainedSchema) -> Finding:
        return examine(_grammar_of(bound), settings.limits.max_schema_compile_s)

    bound = constrained_schema(schema, settings, param, style)
    found = compiled(bound)
    if found.fault is not None and not style.is_strict:
        bound = relieved(bound, settings)
        found = compiled(bound)
    if found.fault is not None:
        advice = NOT_STRICT if style.is_strict else ""
        raise refusal(readable(found.fault), WHAT, param, advice)
    return AnswerGrammar(_grammar_of(bound), (*bound.unheld, *found.warnings))


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
        InvalidRequestError: The schema, or the expression of white space, is too large, or a strict
            schema can't be held.
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
    holder = SchemaHolder(is_strict=style.is_strict)
    held = holder.held(schema)
    if style.is_strict and holder.faults:
        raise refusal(holder.faults[0], WHAT, param, NOT_STRICT)
    made = {**(closed(held) if closes else held), OPTIONS: options}
    return ConstrainedSchema(made, tuple(sorted(holder.unheld)))


def relieved(bound: ConstrainedSchema, settings: GrammarSettings) -> ConstrainedSchema:
    """Return a schema without the patterns and formats that can't be compiled by themselves.

    Call it after a schema as a whole could not be compiled, because each part takes as long again.

    Args:
        bound: A schema that is not strict.
        settings: Limit the compile time.
    """
    unheld = set(bound.unheld)
    num_examined = 0

    def is_fit(part: Schema) -> bool:
        nonlocal num_examined
        num_examined += 1
        grammar = _grammar_of(ConstrainedSchema({**part, OPTIONS: bound.schema[OPTIONS]}))
        return examine(grammar, settings.limits.max_schema_compile_s).fault is None

    def change(_: Schema, made: dict[str, Any]) -> dict[str, Any]:
        if num_examined < MAX_NUM_EXAMINED and "pattern" in made:
            text: dict[str, Any] = {k: made[k] for k in _STRING_KEYWORDS if k in made}
            text["type"] = "string"
            if not is_fit(text):
                made = _without(made, _too_much(text, is_fit), unheld)
        if num_examined < MAX_NUM_EXAMINED and _NAMES_BY_PATTERN in made:
            any_value = dict.fromkeys(made[_NAMES_BY_PATTERN], True)
            if not is_fit({"type": "object", _NAMES_BY_PATTERN: any_value}):
                unheld.add(_NAMES_BY_PATTERN)
                open_names(made)
        return made

    return ConstrainedSchema(rebuilt(bound.schema, change), tuple(sorted(unheld)))


def _too_much(text: Schema, is_fit: Callable[[Schema], bool]) -> tuple[str, ...]:
    for keywords in _TOO_MUCH:
        if text.keys() >= {*keywords} and is_fit(_without(text, keywords)):
            return keywords
    return ()


def _without(
    schema: Schema, keywords: Iterable[str], unheld: set[str] | None = None
) -> dict[str, Any]:
    for keyword in keywords:
        if unheld is not None:
            unheld.add(f"format {schema['format']}" if keyword == "format" else keyword)
    return {keyword: value for keyword, value in schema.items() if keyword not in keywords}


def _grammar_of(bound: ConstrainedSchema) -> str:
    return serialized("start: @json\n", [{"name": "json", "json_schema": bound.schema}])
