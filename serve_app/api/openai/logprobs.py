"""Log-probabilities of an answer's tokens, in OpenAI's two shapes: for chats and for completions.

There is one entry for each token that the usage counts. That includes the token that ended the text
and the tokens of a stop string, which the text does not hold. In a stream, entries come as soon as
their tokens do, so a chunk may hold entries but no text.

Source: https://platform.openai.com/docs/api-reference/chat/object (choices, logprobs)
Source: https://platform.openai.com/docs/api-reference/completions/object (choices, logprobs)
"""

import codecs
from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, Field

from deployments.contract import TokenLogprob, TokenLogprobs

LOGPROB_OF_THE_IMPOSSIBLE = -9999.0
"""OpenAI writes this for -inf, which JSON does not have."""


class LikelyToken(BaseModel):
    """A token and its log-probability."""

    token: str = Field(description="Bytes that are no whole character are shown as U+FFFD.")
    logprob: float
    bytes: list[int] = Field(description="The bytes of all tokens, joined, are UTF-8.")

    @classmethod
    def of(cls, token: TokenLogprob) -> Self:
        """Return a token in the shape of chats."""
        logprob = max(token.logprob, LOGPROB_OF_THE_IMPOSSIBLE)
        return cls(token=token.text, logprob=logprob, bytes=list(token.token_bytes))


class ChosenToken(LikelyToken):
    """A token of the answer, and the likeliest tokens at its position."""

    top_logprobs: list[LikelyToken] = Field(default=[])


class ChoiceLogprobs(BaseModel):
    """The tokens of an answer, or of a part of it."""

    content: list[ChosenToken]
    refusal: None = None

    @classmethod
    def of(cls, logprobs: Sequence[TokenLogprobs]) -> Self:
        """Return tokens in the shape of chats."""
        content = [ChosenToken.of(each.chosen) for each in logprobs]
        for chosen, each in zip(content, logprobs, strict=True):
            chosen.top_logprobs = [LikelyToken.of(likely) for likely in each.top]
        return cls(content=content)


class CompletionLogprobs(BaseModel):
    """The tokens of an answer, or of a part of it: each has one entry in every list."""

    tokens: list[str] = Field(
        description="A token whose bytes are no whole characters is written 'bytes:\\xe2'."
    )
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] = Field(
        description="The likeliest tokens at each position, and the token of the answer."
    )
    text_offset: list[int] = Field(description="Characters in the tokens before this one.")


class LogprobsWriter:
    """Writes the tokens of one answer in the shape of completions, and counts their characters."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_characters = 0

    def write(self, logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Return the next tokens in the shape of completions."""
        return CompletionLogprobs(
            tokens=[_name(each.chosen) for each in logprobs],
            token_logprobs=[_finite(each.chosen) for each in logprobs],
            top_logprobs=[_top(each) for each in logprobs],
            text_offset=[self._advance(each.chosen) for each in logprobs],
        )

    def _advance(self, token: TokenLogprob) -> int:
        """Return the offset of a token, and move past it."""
        offset = self._num_characters
        self._num_characters += len(self._utf8.decode(token.token_bytes))
        return offset


def _top(token: TokenLogprobs) -> dict[str, float]:
    # Two tokens may have the same name; the likelier one, which comes first, keeps it.
    top = {_name(likely): _finite(likely) for likely in reversed((*token.top, token.chosen))}
    return dict(reversed(top.items()))


def _name(token: TokenLogprob) -> str:
    try:
        return token.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)


def _finite(token: TokenLogprob) -> float:
    return max(token.logprob, LOGPROB_OF_THE_IMPOSSIBLE)
