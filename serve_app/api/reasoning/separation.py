"""How the reasoning of one request's answers is separated from their content, and counted."""

from collections.abc import Iterable, Sequence
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

    On channels, each message on the reasoning's channel counts. Else only a block at the answer's
    beginning does.

    Attributes:
        num_tokens: The tokens so far, the marks included.
        is_undecided: Whether the last token will count if the channel's name follows it.
    """

    def __init__(self, tokens: ReasoningTokens, prompt: PromptReasoning) -> None:
        """Start before the answer."""
        self.num_tokens = 0
        self.is_undecided = False
        self._tokens = tokens
        self._is_reasoning = prompt is PromptReasoning.BEGUN
        self._may_begin = tokens.channel is not None or prompt is PromptReasoning.OPEN

    def add(self, token_ids: Iterable[int]) -> None:
        """Count the next tokens of the answer."""
        for token_id in token_ids:
            self._add(token_id)

    def _add(self, token_id: int) -> None:
        start, end, channel = self._tokens.start, self._tokens.end, self._tokens.channel
        if self.is_undecided:
            self._is_reasoning = token_id == channel
            self.num_tokens += self._is_reasoning  # the mark before the channel's name
        elif channel is None and self._may_begin:
            self._is_reasoning = token_id == start
        # The mark begins the next message, whether the reasoning's own end has come or not.
        self.is_undecided = channel is not None and token_id == start
        self._may_begin = channel is not None
        self._is_reasoning &= not self.is_undecided
        self.num_tokens += self._is_reasoning
        self._is_reasoning &= token_id != end


class LogprobsFilter:
    """Leaves out the log-probabilities of one answer's reasoning if the client does not get it."""

    def __init__(self, hidden: ReasoningCounter | None = None) -> None:
        """Start before the answer.

        Args:
            hidden: Counts the reasoning to leave out; None leaves out nothing.
        """
        self._hidden = hidden
        self._held: list[TokenLogprobs] = []  # of tokens that may turn out to be reasoning

    def shown(self, delta: TextDelta) -> Sequence[TokenLogprobs]:
        """Return what the client gets now, of the answer's next delta and of what was held back."""
        if self._hidden is None:
            return delta.logprobs
        shown: list[TokenLogprobs] = []
        # Each token has an entry, or none has: then they were not requested.
        for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=False):
            num_before = self._hidden.num_tokens
            self._hidden.add((token_id,))
            self._held.append(entry)
            if not self._hidden.is_undecided:
                shown += self._released(self._hidden.num_tokens - num_before)
        if delta.finish_reason is not None:
            shown += self._released(0)
        return shown

    def _released(self, num_hidden: int) -> list[TokenLogprobs]:
        """Return what was held back, without the last entries, which are of reasoning."""
        held, self._held = self._held, []
        return held[: len(held) - num_hidden]
