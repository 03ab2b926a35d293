"""The tools of one request, and what becomes of them on the way to the model and back."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from deployments.contract import ModelDescription, SamplingParams, Tool
from deployments.errors import InvalidRequestError
from deployments.tool_call_format import FORMATS, ToolCallFormat
from serve_app.api.offered_function import OfferedFunction
from serve_app.api.tool_grammar import MAX_FORCED_CALLS, CallGrammar, Write, check_grammar
from serve_app.config import LimitsConfig
from serve_app.tool_calls.answer import ToolAnswer
from serve_app.tool_calls.parser import ToolCallParser


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


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """What a request lets the model call.

    Attributes:
        tools: What the prompt tells of.
        functions: What may be called.
        format: How calls are written; None: there are none to be looked for.
        must_call: Whether the answer is nothing but calls.
        max_calls: The most calls of one answer; None means any number.
        token_ids: The marks of the format that are special tokens.
    """

    tools: tuple[Tool, ...] = ()
    functions: tuple[OfferedFunction, ...] = ()
    format: ToolCallFormat | None = None
    must_call: bool = False
    max_calls: int | None = None
    token_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> Collection[str]:
        """The functions that may be called."""
        return frozenset(function.name for function in self.functions)

    def parser(self) -> ToolCallParser | None:
        """Return a parser for one answer; None if it holds text alone."""
        if self.format is None:
            return None
        return ToolCallParser(self.format, self.names, self.max_calls)

    def read(self, text: str, *, is_cut: bool = False) -> ToolAnswer:
        """Return what a whole answer holds; see `ToolCallParser.finish`."""
        parser = self.parser()
        if parser is None or self.format is None:
            return ToolAnswer(text, ())
        return ToolAnswer.of([*parser.feed(text), *parser.finish(is_cut=is_cut)], self.format)

    def is_guiding(self, sampling: SamplingParams) -> bool:
        """Return whether `guide` would change anything."""
        return self.format is not None and (
            bool(self.token_ids) or self._is_bound or sampling.grammar is not None
        )

    def guide(self, sampling: SamplingParams, limits: LimitsConfig) -> SamplingParams:
        """Return the parameters under which an answer is what was asked for.

        It compiles a grammar, so call it off the event loop. A grammar that is there already, for
        the text, leaves room for calls beside it, or gives way if there must be calls.

        Raises:
            InvalidRequestError: The schema of a function can't be honoured.
        """
        if self.format is None:
            return sampling
        if self.token_ids:
            sampling = replace(sampling, skip_special_tokens=False)
        if not self._is_bound and sampling.grammar is None:
            return sampling
        grammar = CallGrammar(self.format, limits, self.max_calls or MAX_FORCED_CALLS)
        write: Write
        if self.must_call:
            write = grammar.forced
        elif sampling.grammar is None:
            write = grammar.allowed
        else:
            write = grammar.beside(sampling.grammar)
        check_grammar(write, self.functions, limits)
        return replace(sampling, grammar=write(self.functions, self.token_ids))

    @property
    def _is_bound(self) -> bool:
        return self.must_call or any(function.is_strict for function in self.functions)


NO_TOOLS: Final = ToolOffer()


def make_offer(
    functions: Sequence[OfferedFunction], choice: ToolChoice, model: ModelDescription
) -> ToolOffer:
    """Return what the model is offered.

    Raises:
        InvalidRequestError: The model can't be told of tools, or its calls can't be read.
    """
    is_single = choice.name is not None or not choice.is_parallel
    return ToolOffer(
        tools=tuple(function.tool for function in functions),
        functions=tuple(f for f in functions if choice.name in (None, f.name)),
        format=_format_of(model),
        must_call=choice.must_call,
        max_calls=1 if is_single else None,
        token_ids=dict(model.tool_call_token_ids),
    )


def _format_of(model: ModelDescription) -> ToolCallFormat:
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
