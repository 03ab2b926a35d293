"""Grammars that make a model call as it was taught: marks, function's name, arguments by schema.

A grammar is llguidance's: rules in its dialect of Lark, and a JSON schema for the arguments of each
function. Marks that are special tokens stand in it by their ids, for no text matches them.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from deployments.tool_call_format import ToolCallFormat
from serve_app.tool_calls.function import Function

MAX_FORCED_CALLS = 16
"""Calls in one answer, so that a model that does not stop is stopped."""

ANYTHING = "(.|\\n)*"
NO_OBJECT = r"([^{\s](.|\n)*)?"
"""Text that no reader takes for a call without a mark."""

AS_MODELS_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Chat templates write arguments so; and free white space would let a small model write no end."""


class CallGrammar:
    """Writes the grammars of one format over the functions that were offered."""

    def __init__(
        self, known: ToolCallFormat, functions: Sequence[Function], token_ids: Mapping[str, int]
    ) -> None:
        """Take what is called, and how.

        Args:
            known: How the model writes calls.
            functions: At least one; a call is of one of them.
            token_ids: The marks of the format that are special tokens.
        """
        self._known = known
        self._functions = functions
        self._token_ids = token_ids

    def forced(self, max_calls: int) -> str:
        """Return the grammar of an answer that is one call, or several, and nothing else."""
        return self._with_functions(f"start: {self._calls(max_calls)}\n")

    def allowed(self, max_calls: int) -> str:
        """Return the grammar of an answer that is any text, in which each call fits its schema."""
        known = self._known
        opening = known.block[0] + known.call[0]
        if not opening:
            rules = f"start: calls | TEXT\ncalls: {self._calls(max_calls)}\nTEXT: /{NO_OBJECT}/\n"
            return self._with_functions(rules)
        mark = opening.split()[0]
        rest = opening[len(mark) :] if opening.startswith(mark) else opening
        in_block = max_calls if known.block[0] else 1
        rules = f"start: opened* TEXT\nTEXT: /{ANYTHING}/\n"
        rules += f"opened: marked {self._literal(rest)} {self._calls(in_block, opened=True)}\n"
        # A lazy rule ends with its mark; a special token needs none of that.
        is_token = mark in self._token_ids
        rules += f"marked{'' if is_token else '[lazy]'}: TEXT {self._literal(mark)}\n"
        return self._with_functions(rules)

    def _calls(self, max_calls: int, opened: bool = False) -> str:
        """Return the rule of a row of calls; of one whose opening was read if it is opened."""
        known, literal = self._known, self._literal
        call = f"{literal(known.call[0])} function {literal(known.call[1])}"
        first = f"function {literal(known.call[1])}" if opened else call
        more = (
            f"( {literal(known.separator)} {call} ){{0,{max_calls - 1}}}" if max_calls > 1 else ""
        )
        begin = "" if opened else literal(known.block[0])
        return f"{begin} {first} {more} {literal(known.block[1])}"

    def _with_functions(self, rules: str) -> str:
        key, places = self._known.arguments_key, range(len(self._functions))
        rules += f"function: {' | '.join(f'function_{at}' for at in places)}\n"
        for at, function in enumerate(self._functions):
            head = f'{{"name": {json.dumps(function.name)}, "{key}": '
            rules += f'function_{at}: {json.dumps(head)} @arguments_{at} "}}"\n'
        grammars: list[dict[str, Any]] = [{"name": "answer", "lark_grammar": rules}]
        grammars += [
            {"name": f"arguments_{at}", "json_schema": _schema(function)}
            for at, function in enumerate(self._functions)
        ]
        return json.dumps({"grammars": grammars})

    def _literal(self, text: str) -> str:
        """Return a text as the rules write it; nothing for no text."""
        marks = "|".join(map(re.escape, self._token_ids))
        pieces = re.split(f"({marks})", text) if marks else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def _piece(self, piece: str) -> str:
        token_id = self._token_ids.get(piece)
        return json.dumps(piece) if token_id is None else f"<[{token_id}]>"


def _schema(function: Function) -> dict[str, Any]:
    """Return the schema of the arguments, with how they are written.

    What the grammar does not know of JSON schema is refused where calls must be strict, and left
    out where they need not.
    """
    schema: dict[str, Any] = json.loads(function.tool.parameters)
    schema.setdefault("type", "object")
    return {**schema, "x-guidance": {**AS_MODELS_WRITE, "lenient": not function.is_strict}}
