"""The tools of one request, and what becomes of them on the way to the model and back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from deployments.contract import ModelDescription, SamplingParams, Tool
from deployments.errors import InvalidRequestError
from deployments.tool_call_format import FORMATS, ToolCallFormat
from serve_app.tool_calls.answer import ToolAnswer
from serve_app.tool_calls.function import Function
from serve_app.tool_calls.grammar import MAX_FORCED_CALLS, CallGrammar
from serve_app.tool_calls.parser import ToolCallParser


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """What a request lets the model call.

    Attributes:
        tools: What the prompt tells of.
        format: How calls are written; None: there are none to be looked for.
        names: The functions that may be called.
        max_calls: The most calls of one answer; None means any number.
        grammar: What the answer must fit; None means nothing.
        shows_special_tokens: Whether the answer's text must hold them, since marks are among them.
    """

    tools: tuple[Tool, ...] = ()
    format: ToolCallFormat | None = None
    names: frozenset[str] = frozenset()
    max_calls: int | None = None
    grammar: str | None = None
    shows_special_tokens: bool = False

    def parser(self) -> ToolCallParser | None:
        """Return a parser for one answer; None if it holds text alone."""
        if self.format is None:
            return None
        return ToolCallParser(self.format, self.names, self.max_calls)

    def read(self, text: str) -> ToolAnswer:
        """Return what a whole answer holds."""
        parser = self.parser()
        if parser is None or self.format is None:
            return ToolAnswer(text, ())
        return ToolAnswer.of([*parser.feed(text), *parser.finish()], self.format)

    def guide(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters under which an answer is what was asked for."""
        if self.shows_special_tokens:
            sampling = replace(sampling, skip_special_tokens=False)
        return sampling if self.grammar is None else replace(sampling, grammar=self.grammar)


NO_TOOLS: Final = ToolOffer()


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the client wants of the functions that it offers.

    Attributes:
        must_call: Whether the answer is a call, or several.
        name: The one function that is called.
        is_parallel: Whether an answer may hold several calls.
    """

    must_call: bool = False
    name: str | None = None
    is_parallel: bool = True


def make_offer(
    functions: Sequence[Function], choice: ToolChoice, model: ModelDescription
) -> ToolOffer:
    """Return what the model is offered.

    Raises:
        InvalidRequestError: The model can't be told of tools, or its calls can't be read.
    """
    known = tool_call_format(model)
    tools = tuple(function.tool for function in functions)
    if choice.name is not None:
        functions = [function for function in functions if function.name == choice.name]
    is_single = choice.name is not None or not choice.is_parallel
    token_ids = dict(model.tool_call_token_ids)
    writer = CallGrammar(known, functions, token_ids)
    max_calls = 1 if is_single else MAX_FORCED_CALLS
    grammar = None
    if choice.must_call:
        grammar = writer.forced(max_calls)
    elif any(function.is_strict for function in functions):
        grammar = writer.allowed(max_calls)
    return ToolOffer(
        tools=tools,
        format=known,
        names=frozenset(function.name for function in functions),
        max_calls=1 if is_single else None,
        grammar=grammar,
        shows_special_tokens=bool(token_ids),
    )


def tool_call_format(model: ModelDescription) -> ToolCallFormat:
    """Return how the model writes calls.

    Raises:
        InvalidRequestError: It can't be told of tools, or its calls can't be read.
    """
    if not model.accepts_tools:
        raise InvalidRequestError(
            f"The chat template of {model.id!r} knows no tools; choose another model.", "tools"
        )
    known = FORMATS.get(model.tool_call_format or "")
    if known is None:
        raise InvalidRequestError(
            f"How {model.id!r} writes calls of tools is not known here, or tools are off; "
            "`tool_call_parser` in the server's configuration decides.",
            "tools",
        )
    return known
