"""How the reasoning of one request's answers is separated from their content, and counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from deployments.contract.descriptions import ModelDescription
from deployments.contract.formats.reasoning_format import (
    REASONING_FORMATS,
    PromptReasoning,
    ReasoningFormat,
)
from deployments.contract.output import TextDelta, TokenLogprobs
from deployments.contract.sampling_params import ReasoningTokens
from serve_app.api.reasoning.parser import ReasoningParser


@dataclass(frozen=True, slots=True)
class Separation:
    """The reasoning in the answers to one request.

    Attributes:
        format: How the model marks it.
        tokens: The ids of the marks.
        prompt: What the end of the prompt says about it.
        is_shown: Whether the client gets it.
    """

    format: ReasoningFormat
    tokens: ReasoningTokens
    prompt: PromptReasoning
    is_shown: bool = True

    @classmethod
    def of(
        cls, model: ModelDescription, prompt: PromptReasoning, is_shown: bool = True
    ) -> Self | None:
        """Return how a model's answers are separated; None if they have no reasoning."""
        if model.reasoning is None:
            return None
        known = REASONING_FORMATS[model.reasoning.format]
        return cls(known, model.reasoning.tokens, prompt, is_shown)

    def parser(self) -> ReasoningParser:
        """Return a parser for one answer."""
        return ReasoningParser(self.format, self.prompt)

    def counter(self) -> "ReasoningCounter":
        """Return a counter for one answer."""
        return ReasoningCounter(self.tokens, self.prompt)

    def logprobs_filter(self) -> "LogprobsFilter":
        """Return a filter for the log-probabilities of one answer."""
        return LogprobsFilter(None if self.is_shown else self.counter())


class ReasoningCounter:
    """Counts the tokens of one answer's reasoning, by the ids of its marks.

    Attributes:
        num_tokens: The tokens so far, the marks included.
    """

    def __init__(self, tokens: ReasoningTokens, prompt: PromptReasoning) -> None:
        """Start before the answer."""
        self.num_tokens = 0
        self._tokens = tokens
        self._has_begun = prompt is PromptReasoning.BEGUN
        self._has_ended = prompt is PromptReasoning.ENDED
        self._opening = [tokens.start] + ([] if tokens.channel is None else [tokens.channel])
        self._first: list[int] = []  # tokens that may turn out to begin the reasoning

    def add(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens of the answer."""
        if self._has_ended or not token_ids:
            return
        if not self._has_begun:
            token_ids = self._first = [*self._first, *token_ids]
            length = len(self._opening)
            if token_ids[:length] != self._opening[: len(token_ids)]:
                self._has_ended = True
                return
            if len(token_ids) < length:
                return
        self._has_begun = True
        self._has_ended = self._tokens.end in token_ids
        self.num_tokens += (
            token_ids.index(self._tokens.end) + 1 if self._has_ended else len(token_ids)
        )


class LogprobsFilter:
    """Leaves out the log-probabilities of one answer's reasoning if the client does not get it."""

    def __init__(self, hidden: ReasoningCounter | None = None) -> None:
        """Start before the answer.

        Args:
            hidden: Counts the reasoning to leave out; None leaves out nothing.
        """
        self._hidden = hidden

    def shown(self, delta: TextDelta) -> Sequence[TokenLogprobs]:
        """Return those of the answer's next delta that the client gets."""
        if self._hidden is None:
            return delta.logprobs
        num_before = self._hidden.num_tokens
        self._hidden.add(delta.token_ids)
        # The reasoning comes first, and each token has one entry.
        return delta.logprobs[self._hidden.num_tokens - num_before :]
