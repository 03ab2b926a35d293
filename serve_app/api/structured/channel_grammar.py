"""Grammars of answers on channels (harmony): calls and texts, each after any reasoning.

Marks are special tokens, which no text matches, so a message's free text ends at its mark. The
reasoning is part of the grammar: the mark before it also comes before every other message.

Source: OpenAI, Harmony response format, https://cookbook.openai.com/articles/openai-harmony
"""

from collections.abc import Mapping, Sequence
from typing import Final

from deployments.contract.errors import InvalidRequestError
from deployments.contract.formats.tool_call_format import OPENAI
from serve_app.api.structured.answer_grammar import parts_of, serialized
from serve_app.api.structured.tool_grammar import (
    ANYTHING,
    CallGrammar,
    OfferedFunction,
    Write,
    with_tokens,
)

_NEXT: Final = '"<|end|><|start|>assistant"'

_RULES: Final = (
    f"TEXT: /{ANYTHING}/\n"
    f'thought: "<|channel|>analysis<|message|>" TEXT {_NEXT}\n'
    f'remark: thought | "<|channel|>commentary<|message|>" TEXT {_NEXT}\n'
)
"""Messages that may come before the last one: reasoning, and remarks to the user."""

_FINAL: Final = '"<|channel|>final<|message|>"'


def after_reasoning(answer: str, token_ids: Mapping[str, int], field: str) -> str:
    """Return a grammar of any reasoning, and then of the text of another grammar.

    Args:
        answer: The other grammar, serialized.
        token_ids: The marks, with their ids.
        field: The request's field that the other grammar comes from.

    Raises:
        InvalidRequestError: The ids are not known, because the configuration has turned tools off.
    """
    if not token_ids.keys() >= {*OPENAI.marks}:
        raise InvalidRequestError(
            f"This model's answers are messages on channels, and {field} needs "
            "`tool_call_parser: openai` in the server's configuration.",
            field,
        )
    rules = f"start: thought* {_FINAL} @text\n{_RULES}"
    return serialized(with_tokens(rules, token_ids), parts_of(answer, "text"))


class ChannelGrammar(CallGrammar):
    """Writes the grammars of calls on channels. An answer ends with its first call."""

    @property
    def mark(self) -> str:
        """The end of the mark before each call."""
        return "json<|message|>"

    def forced(self, functions: Sequence[OfferedFunction], token_ids: Mapping[str, int]) -> str:
        """Return the grammar of any reasoning, and then a call."""
        return self._serialized("start: thought* function\n", functions, token_ids)

    def allowed(self, functions: Sequence[OfferedFunction], token_ids: Mapping[str, int]) -> str:
        """Return the grammar of any answer whose call, if it has one, fits its schema."""
        rules = f"start: remark* ( function | {_FINAL} TEXT )\n"
        return self._serialized(rules, functions, token_ids)

    def alternative_to(self, answer: str, field: str = "response_format") -> Write:
        """Return a writer of a grammar that accepts either a call or the text of another grammar.

        Args:
            answer: The other grammar.
            field: Not used: there is always a mark that tells calls from text.
        """
        text = parts_of(answer, "text")

        def write(functions: Sequence[OfferedFunction], token_ids: Mapping[str, int]) -> str:
            rules = f"start: remark* ( function | {_FINAL} @text )\n"
            return self._serialized(rules, functions, token_ids, *text)

        return write

    def _rules_of(self, functions: Sequence[OfferedFunction]) -> str:
        rules = _RULES
        for at, function in enumerate(functions):
            to = f"to=functions.{function.name}"
            rules += (
                f'function_{at}: ( " {to}<|channel|>commentary json<|message|>"'
                f' | "<|channel|>commentary {to} <|constrain|>json<|message|>" ) @arguments_{at}\n'
            )
        return rules
