"""The tools of one request: how they constrain the answer, and how calls are read from it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from deployments.contract.descriptions import ModelDescription
from deployments.contract.errors import InvalidRequestError
from deployments.contract.formats.tool_call_format import FORMATS, ToolCallFormat
from deployments.contract.messages import Tool
from deployments.contract.sampling_params import SamplingParams
from serve_app.api.structured.answer_grammar import GrammarSettings
from serve_app.api.structured.channel_grammar import ChannelGrammar
from serve_app.api.structured.tool_grammar import (
    MAX_FORCED_CALLS,
    CallGrammar,
    OfferedFunction,
    Write,
    check_grammar,
)
from serve_app.api.tools.parsing.parser import ToolCallParser


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The client's choice: whether a call is required, and of which functions.

    Attributes:
        must_call: Whether the answer must be one or several calls.
        names: The only functions that may be called; None allows all.
        is_parallel: Whether an answer may hold several calls.
        forbids: Whether no function may be called.
        hides_others: Whether the prompt describes only the functions in `names`.
        names_param: The request's field that holds the names.
    """

    must_call: bool = False
    names: frozenset[str] | None = None
    is_parallel: bool = True
    forbids: bool = False
    hides_others: bool = False
    names_param: str = "tool_choice"


@dataclass(frozen=True, slots=True)
class Guided:
    """Parameters of an answer that may hold calls.

    Attributes:
        sampling: The parameters.
        unheld: What their grammar leaves out of the functions' schemas.
    """

    sampling: SamplingParams
    unheld: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The functions that a request lets the model call.

    Attributes:
        tools: The tools that the prompt describes.
        functions: The functions that may be called.
        format: How the model writes calls; None if the answer is only text.
        must_call: Whether the answer must be only calls.
        max_calls: The most calls of one answer; None means any number.
        token_ids: The format's marks that are special tokens, with their ids.
        left_out: The types of the request's tools that do not run here.
    """

    tools: tuple[Tool, ...] = ()
    functions: tuple[OfferedFunction, ...] = ()
    format: ToolCallFormat | None = None
    must_call: bool = False
    max_calls: int | None = None
    token_ids: Mapping[str, int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def names(self) -> Collection[str]:
        """The names of the functions that may be called."""
        return frozenset(function.name for function in self.functions)

    def parser(self) -> ToolCallParser | None:
        """Return a parser for one answer; None if the answer is only text."""
        if self.format is None:
            return None
        return ToolCallParser(self.format, self.names, self.max_calls, must_call=self.must_call)

    def is_guiding(self, sampling: SamplingParams) -> bool:
        """Return whether `guide` would change anything."""
        return self.format is not None and (
            bool(self.token_ids) or self._is_bound or sampling.grammar is not None
        )

    def guide(
        self, sampling: SamplingParams, settings: GrammarSettings, field: str = "response_format"
    ) -> Guided:
        """Return the parameters with a grammar that makes the answer's calls valid.

        It compiles that grammar, so call it off the event loop. If the parameters already have a
        grammar, the new one allows calls as an alternative to it; if the answer must be calls, the
        new one replaces it.

        Args:
            sampling: The parameters.
            settings: The bounds on schemas.
            field: The request's field that the parameters' grammar comes from.

        Raises:
            InvalidRequestError: The schema of a function can't be honoured.
        """
        if self.format is None:
            return Guided(sampling)
        if self.token_ids:
            sampling = replace(sampling, skip_special_tokens=False)
        if not self._is_bound and sampling.grammar is None:
            return Guided(sampling)
        kind = ChannelGrammar if self.format.has_channels else CallGrammar
        grammar = kind(self.format, settings, self.max_calls or MAX_FORCED_CALLS)
        write: Write
        if self.must_call:
            write = grammar.forced
        elif sampling.grammar is None:
            write = grammar.allowed
        else:
            write = grammar.alternative_to(sampling.grammar, field)
        unheld = check_grammar(grammar, write, self.functions, settings)
        made = replace(
            sampling,
            grammar=write(self.functions, self.token_ids),
            # A stop string would cut a call into one that no schema allows.
            stop=() if self.must_call else sampling.stop,
            call_mark=None if self.must_call else grammar.mark,
        )
        return Guided(made, (*grammar.unheld(self.functions), *unheld))

    @property
    def _is_bound(self) -> bool:
        return self.must_call or any(function.is_strict for function in self.functions)


NO_TOOLS: Final = ToolOffer()


def make_offer(
    functions: Sequence[OfferedFunction], choice: ToolChoice, model: ModelDescription
) -> ToolOffer:
    """Return the offer for one request.

    Raises:
        InvalidRequestError: The model does not support tools, or its format of calls is unknown.
    """
    names = choice.names
    return ToolOffer(
        tools=tuple(function.tool for function in functions),
        functions=tuple(f for f in functions if names is None or f.name in names),
        format=_format_of(model),
        must_call=choice.must_call,
        max_calls=None if choice.is_parallel else 1,
        token_ids=dict(model.tool_call_token_ids),
    )


def _format_of(model: ModelDescription) -> ToolCallFormat:
    """Return the model's format of calls.

    Raises:
        InvalidRequestError: The model does not support tools, or its format is unknown.
    """
    if not model.accepts_tools:
        raise InvalidRequestError(
            f"The chat template of {model.id!r} does not support tools; choose another model.",
            "tools",
        )
    known = FORMATS.get(model.tool_call_format or "")
    if known is None:
        raise InvalidRequestError(
            f"Tools are off for {model.id!r}, or its format of calls is not known here. Set "
            "`tool_call_parser` in the server's configuration.",
            "tools",
        )
    return known
