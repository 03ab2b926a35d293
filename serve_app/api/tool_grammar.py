"""Grammars that make a model call as it was taught: marks, function's name, arguments by schema.

A grammar is llguidance's: rules in its dialect of Lark, and a JSON schema for the arguments of each
function. Marks that are special tokens stand in it by their ids, for no text matches them.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from deployments.engine.grammar_probe import find_fault
from deployments.errors import InvalidRequestError
from deployments.tool_call_format import ToolCallFormat
from serve_app.api.json_schema_grammar import OPTIONS, constrained_schema
from serve_app.api.offered_function import OfferedFunction
from serve_app.config import LimitsConfig

MAX_FORCED_CALLS: Final = 16
"""Calls in one answer, so that a model that does not stop is stopped."""

ANYTHING: Final = r"(.|\n)*"
NO_OBJECT: Final = r"([^{\s](.|\n)*)?"
"""Text that no reader takes for a call without a mark."""

_MAX_ECHO = 200

Write = Callable[[Sequence[OfferedFunction], Mapping[str, int]], str]
"""Writes a grammar over functions, with the ids of the marks that are special tokens."""


class CallGrammar:
    """Writes the grammars of one format."""

    def __init__(self, known: ToolCallFormat, limits: LimitsConfig, max_calls: int) -> None:
        """Take how calls are written and how many there may be in one answer."""
        self._known = known
        self._limits = limits
        self._max_calls = max_calls

    def forced(self, functions: Sequence[OfferedFunction], token_ids: Mapping[str, int]) -> str:
        """Return the grammar of an answer that is one call, or several, and nothing else."""
        rules = f"start: {self._calls(self._max_calls)}\n"
        return self._serialized(rules, functions, token_ids)

    def allowed(self, functions: Sequence[OfferedFunction], token_ids: Mapping[str, int]) -> str:
        """Return the grammar of an answer that is any text, in which each call fits its schema."""
        known = self._known
        opening = known.block[0] + known.call[0]
        if not opening:
            rules = f"start: calls | TEXT\ncalls: {self._calls(self._max_calls)}\n"
            return self._serialized(rules + f"TEXT: /{NO_OBJECT}/\n", functions, token_ids)
        mark = opening.split()[0]
        in_block = self._max_calls if known.block[0] else 1
        rules = f"start: opened* TEXT\nTEXT: /{ANYTHING}/\n"
        rules += f"opened: marked {_text(opening[len(mark) :])} {self._calls(in_block, True)}\n"
        # A lazy rule ends with its mark; a special token needs none of that.
        rules += f"marked{'' if mark in token_ids else '[lazy]'}: TEXT {_text(mark)}\n"
        return self._serialized(rules, functions, token_ids)

    def beside(self, answer: str) -> Write:
        """Return what writes the grammar of an answer that is calls, or what another one tells.

        Raises:
            InvalidRequestError: Nothing tells this format's calls from the text.
        """
        if self._known.only_at_start:
            raise InvalidRequestError(
                "This model can't choose between tools and a response_format: nothing marks its "
                "calls. Send one of them, or tool_choice.",
                "response_format",
            )
        (text,) = json.loads(answer)["grammars"]

        def write(functions: Sequence[OfferedFunction], token_ids: Mapping[str, int]) -> str:
            rules = f"start: calls | @text\ncalls: {self._calls(self._max_calls)}\n"
            return self._serialized(rules, functions, token_ids, {**text, "name": "text"})

        return write

    def _calls(self, max_calls: int, is_opened: bool = False) -> str:
        """Return the rule of a row of calls; of one whose opening was read if it is opened."""
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
        *others: Mapping[str, Any],
    ) -> str:
        rules += f"function: {' | '.join(f'function_{at}' for at in range(len(functions)))}\n"
        for at, function in enumerate(functions):
            head = f'{{"name": "{function.name}", "{self._known.arguments_key}": '
            rules += f'function_{at}: {_text(head)} @arguments_{at} "}}"\n'
        schemas = [
            {"name": f"arguments_{at}", "json_schema": self._schema(function)}
            for at, function in enumerate(functions)
        ]
        first = {"name": "answer", "lark_grammar": _with_tokens(rules, token_ids)}
        return json.dumps({"grammars": [first, *schemas, *others]})

    def _schema(self, function: OfferedFunction) -> dict[str, object]:
        """Return the schema of the arguments, with our options.

        What llguidance does not know of JSON schema is refused where calls must be strict, and
        left out where they need not.
        """
        schema: dict[str, object] = {"type": "object", **json.loads(function.tool.parameters)}
        bound = constrained_schema(schema, self._limits, f"{function.param}.parameters")
        options = bound[OPTIONS]
        assert isinstance(options, dict), "our own options are an object"
        return {**bound, OPTIONS: {**options, "lenient": not function.is_strict}}


def check_grammar(write: Write, functions: Sequence[OfferedFunction], limits: LimitsConfig) -> None:
    """Refuse what can't be compiled, or not within the limits.

    It may take some seconds: halves of the functions are tried until the one to blame is found.

    Raises:
        InvalidRequestError: It names the function.
    """
    # The probe's vocabulary has no special tokens; marks are as good for it.
    fault = find_fault(write(functions, {}), limits.max_schema_compile_s)
    if fault is None:
        return
    while len(functions) > 1:
        half = functions[: len(functions) // 2]
        found = find_fault(write(half, {}), limits.max_schema_compile_s)
        functions = functions[len(half) :] if found is None else half
    raise InvalidRequestError(
        f"The function's schema can't be honoured: {fault.partition('. Enable ')[0][:_MAX_ECHO]}.",
        f"{functions[0].param}.parameters",
    )


def _text(text: str) -> str:
    """Return a text as rules write it; nothing for no text."""
    return json.dumps(text) if text else ""


def _with_tokens(rules: str, token_ids: Mapping[str, int]) -> str:
    """Put the ids of special tokens into rules, in the place of their names within texts."""
    for mark, token_id in token_ids.items():
        rules = rules.replace(mark, f'" <[{token_id}]> "')
    # What is left of a text that was nothing but its mark; an escaped quote ends none.
    return re.sub(r'(?<!\\)""', "", rules)
