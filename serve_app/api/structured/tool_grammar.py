"""Grammars that make a model write calls in its own format: marks, name, arguments by schema.

Grammars are in llguidance's form: rules in its dialect of Lark, and a JSON schema for the arguments
of each function. Marks that are special tokens are written by their ids, because no text matches
them.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from deployments.contract.errors import InvalidRequestError
from deployments.contract.formats.tool_call_format import ToolCallFormat
from deployments.contract.grammar.probe import Finding, examine
from deployments.contract.messages import Tool
from serve_app.api.structured.answer_grammar import (
    GrammarSettings,
    Part,
    parts_of,
    refusal,
    serialized,
)
from serve_app.api.structured.fault_text import readable
from serve_app.api.structured.json_schema_grammar import (
    LENIENT,
    MAX_NUM_RELIEVED,
    NOT_STRICT,
    STRICT,
    ConstrainedSchema,
    constrained_schema,
    relieved,
)

MAX_FORCED_CALLS: Final = 16
"""Most calls in one answer, for models that do not stop by themselves."""

ANYTHING: Final = r"(.|\n)*"
NO_OBJECT: Final = r"([^{\s](.|\n)*)?"
"""Text that the parser does not take for a call without a mark."""


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function that a request offers to the model.

    Attributes:
        tool: The description that the model reads.
        is_strict: Whether calls must fit the schema, even if the model may choose not to call.
        param: The place of the function's fields in the request.
        schema_param: The place of its arguments' schema.
    """

    tool: Tool
    is_strict: bool
    param: str
    schema_param: str

    @property
    def name(self) -> str:
        """The name that the model calls."""
        return self.tool.name

    @property
    def num_bytes(self) -> int:
        """The size of the description that the model reads."""
        tool = self.tool
        return sum(len(t.encode()) for t in (tool.name, tool.description or "", tool.parameters))


Write = Callable[[Sequence[OfferedFunction], Mapping[str, int]], str]
"""Writes a grammar over functions, with the ids of the marks that are special tokens."""


class CallGrammar:
    """Writes the grammars of one format."""

    def __init__(self, known: ToolCallFormat, settings: GrammarSettings, max_calls: int) -> None:
        """Use a format of calls, the settings for schemas, and the most calls of one answer."""
        self._known = known
        self._settings = settings
        self._max_calls = max_calls
        self._schemas: dict[OfferedFunction, ConstrainedSchema] = {}

    @property
    def mark(self) -> str:
        """The first mark before a call; empty if the format has none."""
        opening = self._known.block[0] + self._known.call[0]
        return opening.split()[0] if opening else ""

    def forced(self, functions: Sequence[OfferedFunction], token_ids: Mapping[str, int]) -> str:
        """Return the grammar of an answer that is only calls, one or several."""
        rules = f"start: {self._calls(self._max_calls)}\n"
        return self._serialized(rules, functions, token_ids)

    def allowed(self, functions: Sequence[OfferedFunction], token_ids: Mapping[str, int]) -> str:
        """Return the grammar of any text in which every call fits its schema."""
        known = self._known
        opening = known.block[0] + known.call[0]
        if not opening:
            rules = f"start: calls | TEXT\ncalls: {self._calls(self._max_calls)}\n"
            return self._serialized(rules + f"TEXT: /{NO_OBJECT}/\n", functions, token_ids)
        mark = self.mark
        in_block = self._max_calls if known.block[0] else 1
        rules = f"start: opened* TEXT\nTEXT: /{ANYTHING}/\n"
        rules += f"opened: marked {_text(opening[len(mark) :])} {self._calls(in_block, True)}\n"
        # A lazy rule ends at its first mark; a mark that is a special token needs no lazy rule.
        rules += f"marked{'' if mark in token_ids else '[lazy]'}: TEXT {_text(mark)}\n"
        return self._serialized(rules, functions, token_ids)

    def alternative_to(self, answer: str, field: str = "response_format") -> Write:
        """Return a writer of a grammar that accepts either calls or the text of another grammar.

        Args:
            answer: The other grammar.
            field: The request's field that it comes from.

        Raises:
            InvalidRequestError: In this format, no mark tells calls from text.
        """
        if self._known.only_at_start:
            raise InvalidRequestError(
                f"This model can't choose between tools and {field}, because its calls have no "
                "mark. Send one of the two, or tool_choice.",
                field,
            )
        text = parts_of(answer, "text")

        def write(functions: Sequence[OfferedFunction], token_ids: Mapping[str, int]) -> str:
            rules = f"start: calls | @text\ncalls: {self._calls(self._max_calls)}\n"
            return self._serialized(rules, functions, token_ids, *text)

        return write

    def _calls(self, max_calls: int, is_opened: bool = False) -> str:
        """Return the rule of consecutive calls; if `is_opened`, without the first opening mark."""
        known = self._known
        call = f"function {_text(known.call[1])}"
        first = call if is_opened else f"{_text(known.block[0] + known.call[0])} {call}"
        next_call = f"{_text(known.separator + known.call[0])} {call}"
        more = f"( {next_call} ){{0,{max_calls - 1}}}" if max_calls > 1 else ""
        return f"{first} {more} {_text(known.block[1])}"

    def _serialized(
        self,
        rules: str,
        functions: Sequence[OfferedFunction],
        token_ids: Mapping[str, int],
        *others: Part,
    ) -> str:
        rules += f"function: {' | '.join(f'function_{at}' for at in range(len(functions)))}\n"
        rules += self._rules_of(functions)
        schemas = [
            {"name": f"arguments_{at}", "json_schema": self._schema(function).schema}
            for at, function in enumerate(functions)
        ]
        return serialized(with_tokens(rules, token_ids), [*schemas, *others])

    def _rules_of(self, functions: Sequence[OfferedFunction]) -> str:
        """Return the rules of each function's call, `function_0` and so on."""
        rules = ""
        for at, function in enumerate(functions):
            head = f'{{"name": "{function.name}", "{self._known.arguments_key}": '
            rules += f'function_{at}: {_text(head)} @arguments_{at} "}}"\n'
        return rules

    def unheld(self, functions: Sequence[OfferedFunction]) -> tuple[str, ...]:
        """Return what is left out of the functions' schemas before llguidance reads them."""
        return tuple(each for function in functions for each in self._schema(function).unheld)

    def _schema(self, function: OfferedFunction) -> ConstrainedSchema:
        """Return the schema of the arguments, with our options.

        Keywords that llguidance does not support are refused for strict functions, and left out for
        the others. A function's schema is made once, for all grammars that hold it.
        """
        if function not in self._schemas:
            schema: dict[str, object] = {"type": "object", **json.loads(function.tool.parameters)}
            style = STRICT if function.is_strict else LENIENT
            self._schemas[function] = constrained_schema(
                schema, self._settings, function.schema_param, style
            )
        return self._schemas[function]

    def relieve(self, function: OfferedFunction) -> bool:
        """Leave out of a schema what can't be compiled; return whether there is something to."""
        if function.is_strict:
            return False
        was = self._schema(function)
        self._schemas[function] = relieved(was, self._settings)
        return self._schemas[function] != was


def check_grammar(
    calls: CallGrammar,
    write: Write,
    functions: Sequence[OfferedFunction],
    settings: GrammarSettings,
) -> tuple[str, ...]:
    """Refuse functions whose grammar can't be compiled; return what it leaves out of schemas.

    A failure may take some seconds: the faulty function is found by bisection. If it is not strict,
    `calls` leaves out of its schema what can't be compiled.

    Args:
        calls: Has the functions' schemas.
        write: Writes the grammar, one of the writers of `calls`.
        functions: All that the grammar is for.
        settings: Limit the compile time.

    Raises:
        InvalidRequestError: A function's schema can't be honoured; the error names the function.
    """

    def found_in(functions: Sequence[OfferedFunction]) -> Finding:
        # The probe's vocabulary has no special tokens, so marks are text in its grammar.
        return examine(write(functions, {}), settings.limits.max_schema_compile_s)

    found, num_relieved = found_in(functions), 0
    while found.fault is not None:
        faulty = _first_faulty(functions, found_in)
        num_relieved += 1
        if num_relieved > MAX_NUM_RELIEVED or not calls.relieve(faulty):
            advice = NOT_STRICT if faulty.is_strict else ""
            what = f"schema of function {faulty.name!r}"
            raise refusal(readable(found.fault), what, faulty.schema_param, advice)
        found = found_in(functions)
    return found.warnings


def _first_faulty(
    functions: Sequence[OfferedFunction],
    found_in: Callable[[Sequence[OfferedFunction]], Finding],
) -> OfferedFunction:
    while len(functions) > 1:
        half = functions[: len(functions) // 2]
        functions = functions[len(half) :] if found_in(half).fault is None else half
    return functions[0]


def _text(text: str) -> str:
    """Return a text as a literal for rules; an empty string for an empty text."""
    return json.dumps(text) if text else ""


def with_tokens(rules: str, token_ids: Mapping[str, int]) -> str:
    """Replace the names of special tokens in literals with their ids."""
    for mark, token_id in token_ids.items():
        rules = rules.replace(mark, f'" <[{token_id}]> "')
    # Drop the empty literals that a mark leaves behind. An escaped quote does not end a literal.
    return re.sub(r'(?<!\\)""', "", rules)
