"""Writes the grammar of a structural tag.

Free text ends where a mark begins, so it is a lazy terminal that ends with the mark. Where nothing
says how free text ends, another element can't follow it. A regular expression takes as much text as
it can, even if the next element then can't match.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md#tool-calling
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from deployments.contract.grammar.limits import CLIENT_RULES
from deployments.contract.grammar.probe import examine
from serve_app.api.structured.answer_grammar import (
    AnswerGrammar,
    GrammarSettings,
    Part,
    check_depth,
    check_size,
    checked,
    refusal,
    serialized,
)
from serve_app.api.structured.client_grammar import literal, regex_part, rules_part
from serve_app.api.structured.json_schema_grammar import (
    LENIENT,
    MAX_NUM_RELIEVED,
    JsonStyle,
    constrained_schema,
    relieved,
)
from serve_app.api.structured.structural_tag import (
    AnyText,
    ConstString,
    GrammarContent,
    JsonSchemaContent,
    OrFormat,
    RegexContent,
    SequenceFormat,
    StructuralTag,
    Tag,
    TagFormat,
    TagsWithSeparator,
    TriggeredTags,
)

WHAT: Final = "structural tag"

_TEXT: Final = r"TEXT: /(.|\n)*/"


def structural_tag_grammar(
    tag: StructuralTag, settings: GrammarSettings, param: str, style: JsonStyle = LENIENT
) -> AnswerGrammar:
    """Return the grammar of the texts that a structural tag describes.

    This may take up to `limits.max_schema_compile_s`, so call it in a `schema_executor`.

    Args:
        tag: The description.
        settings: The bounds on its size, depth and compile time.
        param: The request's field that holds it.
        style: How the JSON within it is written.

    Raises:
        InvalidRequestError: It is too large, or can't be honoured.
    """
    given = tag.model_dump(by_alias=True)
    check_depth(given, settings, WHAT, param)
    check_size(json.dumps(given), settings, WHAT, param)
    writer = _Writer(settings, param, style)
    grammar = writer.grammar(tag)
    if not style.is_strict and examine(grammar, settings.limits.max_schema_compile_s).fault:
        writer = _Writer(settings, param, style, relieves=True)
        grammar = writer.grammar(tag)
    found = checked(grammar, settings, WHAT, param)
    return AnswerGrammar(found.text, (*writer.unheld, *found.unheld))


class _Writer:
    """Writes the rules of formats.

    Attributes:
        rules: The rules that the expressions of formats refer to.
        parts: What these rules refer to.
        unheld: What the parts leave out of the client's schemas.
    """

    def __init__(
        self, settings: GrammarSettings, param: str, style: JsonStyle, *, relieves: bool = False
    ) -> None:
        self.rules: list[str] = []
        self.parts: list[Part] = []
        self.unheld: list[str] = []
        self._settings = settings
        self._param = param
        self._style = style
        self._num_to_relieve = MAX_NUM_RELIEVED if relieves else 0

    def grammar(self, tag: StructuralTag) -> str:
        """Return the grammar of a tag, for a writer that has written nothing yet."""
        start = self.last(tag.to_format())
        rules = "\n".join([f"start: {start}", _TEXT, *self.rules])
        # A tag's formats may be as ambiguous as a client's rules, so the same bounds hold.
        shaped = {"name": CLIENT_RULES, "lark_grammar": rules}
        return serialized(f"start: @{CLIENT_RULES}\n", [shaped, *self.parts])

    def last(self, format: TagFormat) -> str:
        """Return the expression of a format that ends the answer."""
        match format:
            case AnyText():
                return "TEXT"
            case TriggeredTags():
                return self._triggered(format)
            case SequenceFormat():
                *first, end = format.elements
                return " ".join([*map(self._inner, first), self.last(end)])
            case OrFormat():
                return _any_of([self.last(each) for each in format.elements])
            case Tag(content=AnyText() | TriggeredTags(), end=""):
                return f"{literal(format.begin)} {self.last(format.content)}"
            case _:
                return self._inner(format)

    def _inner(self, format: TagFormat) -> str:
        """Return the expression of a format that something may follow."""
        match format:
            case ConstString():
                return literal(format.value)
            case JsonSchemaContent() | RegexContent() | GrammarContent():
                return self._part(format)
            case SequenceFormat():
                return " ".join(map(self._inner, format.elements))
            case OrFormat():
                return _any_of([self._inner(each) for each in format.elements])
            case Tag():
                return f"{literal(format.begin)} {self._rest_of(format)}"
            case TagsWithSeparator():
                return self._separated(format)
            case TriggeredTags(at_least_one=True, stop_after_first=True):
                return _any_of([self._inner(tag) for tag in format.tags])
            case _:
                raise self._refusal(format.type)

    def _rest_of(self, tag: Tag, num_written: int | None = None) -> str:
        """Return the expression of a tag after `num_written` characters; None: after its mark."""
        begin = "" if num_written is None else tag.begin[num_written:]
        if isinstance(tag.content, AnyText) and tag.end:
            return f"{literal(begin)} {self._rule(f'TEXT {literal(tag.end)}', is_lazy=True)}"
        return f"{literal(begin)} {self._inner(tag.content)} {literal(tag.end)}"

    def _triggered(self, format: TriggeredTags) -> str:
        by_trigger: defaultdict[str, list[Tag]] = defaultdict(list)
        for tag in format.tags:
            by_trigger[next(t for t in format.triggers if tag.begin.startswith(t))].append(tag)
        opened = []
        for trigger, tags in by_trigger.items():
            text_to = self._rule(f"TEXT {literal(trigger)}", is_lazy=True)
            rests = [self._rest_of(tag, len(trigger)) for tag in tags]
            opened.append(f"{text_to} {_any_of(rests)}")
        later = self._rule(_any_of(opened))
        if not format.at_least_one:
            return f"( {later} | TEXT )" if format.stop_after_first else f"{later}* TEXT"
        first = self._rule(_any_of([self._inner(tag) for tag in format.tags]))
        return first if format.stop_after_first else f"{first} {later}* TEXT"

    def _separated(self, format: TagsWithSeparator) -> str:
        tag = self._rule(_any_of([self._inner(tag) for tag in format.tags]))
        more = "" if format.stop_after_first else f"( {literal(format.separator)} {tag} )*"
        return f"( {tag} {more} ){'' if format.at_least_one else '?'}"

    def _part(self, format: JsonSchemaContent | RegexContent | GrammarContent) -> str:
        name = f"part_{len(self.parts)}"
        part: Part
        match format:
            case JsonSchemaContent():
                bound = constrained_schema(
                    format.json_schema, self._settings, self._param, self._style
                )
                if self._num_to_relieve:
                    self._num_to_relieve -= 1
                    bound = relieved(bound, self._settings)
                self.unheld += bound.unheld
                part = {"name": name, "json_schema": bound.schema}
            case RegexContent():
                part = regex_part(format.pattern, name, self._settings, self._param)
            case GrammarContent():
                part = rules_part(
                    format.grammar, f"_{len(self.parts)}", self._settings, self._param
                )
        self.parts.append(part)
        return f"@{part['name']}"

    def _rule(self, expression: str, *, is_lazy: bool = False) -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if is_lazy else ''}: {expression}")
        return name

    def _refusal(self, kind: str) -> Exception:
        why = f"{kind!r} stands where something must follow it, but nothing says where it ends"
        advice = "Let it be the last element, or the content of a tag with an end."
        return refusal(why, WHAT, self._param, advice)


def _any_of(expressions: Sequence[str]) -> str:
    return f"( {' | '.join(expressions)} )"
