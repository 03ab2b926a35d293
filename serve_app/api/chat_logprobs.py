"""How likely the tokens of an answer were, as OpenAI tells it.

There is one entry for each token that is counted in the usage: also for the one that ended the
text, and for those of a stop string, which the text does not hold. In a stream they come as soon as
their tokens do, so a chunk may hold entries and no text yet.

Source: https://platform.openai.com/docs/api-reference/chat/object (choices, logprobs)
"""

from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, Field

from deployments.contract import TokenLogprob, TokenLogprobs

LOGPROB_OF_THE_IMPOSSIBLE = -9999.0
"""JSON has no -inf; this is what OpenAI writes instead."""


class LikelyToken(BaseModel):
    """A token and how likely it was."""

    token: str = Field(description="Bytes that make no whole character are shown as U+FFFD.")
    logprob: float
    bytes: list[int] = Field(description="Those of all tokens joined are UTF-8.")

    @classmethod
    def of(cls, told: TokenLogprob) -> Self:
        """Return what is told of a token."""
        logprob = max(told.logprob, LOGPROB_OF_THE_IMPOSSIBLE)
        return cls(token=told.text, logprob=logprob, bytes=list(told.token_bytes))


class ChosenToken(LikelyToken):
    """A token of the answer, and the likeliest ones at its place."""

    top_logprobs: list[LikelyToken] = Field(default=[])


class ChoiceLogprobs(BaseModel):
    """The tokens of an answer or of a piece of it."""

    content: list[ChosenToken]
    refusal: None = None

    @classmethod
    def of(cls, logprobs: Sequence[TokenLogprobs]) -> Self:
        """Return what is told of these tokens."""
        content = [ChosenToken.of(told.chosen) for told in logprobs]
        for chosen, told in zip(content, logprobs, strict=True):
            chosen.top_logprobs = [LikelyToken.of(likely) for likely in told.top]
        return cls(content=content)
