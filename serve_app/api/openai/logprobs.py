"""Log-probabilities of an answer's tokens, in OpenAI's two shapes, and of a prompt's, in vLLM's.

Chats and completions have a shape each for the answer. There is one entry for each token that the
usage counts. That includes the token that ended the text and the tokens of a stop string, which the
text does not hold. In a stream, entries come as soon as their tokens do, so a chunk may hold
entries but no text.

Source: https://platform.openai.com/docs/api-reference/chat/object (choices, logprobs)
Source: https://platform.openai.com/docs/api-reference/completions/object (choices, logprobs)
Source: https://docs.vllm.ai/en/v0.22.1/api/vllm/logprobs/ (prompt_logprobs)
"""

import asyncio
import codecs
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from pydantic import BaseModel, Field

from deployments.contract.output import PromptLogprobs, TokenLogprob, TokenLogprobs

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
    token_logprobs: list[float | None] = Field(
        description="Null for the first token of a prompt that is repeated."
    )
    top_logprobs: list[dict[str, float] | None] = Field(
        description="The likeliest tokens at each position, and the token of the text. Null as in "
        "token_logprobs."
    )
    text_offset: list[int] = Field(description="Characters in the tokens before this one.")

    def extend(self, others: "CompletionLogprobs") -> None:
        """Add the tokens that follow."""
        self.tokens += others.tokens
        self.token_logprobs += others.token_logprobs
        self.top_logprobs += others.top_logprobs
        self.text_offset += others.text_offset


class LogprobsWriter:
    """Writes the tokens of one text in the shape of completions, and counts their characters."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_characters = 0

    def write(self, logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Return the next tokens in the shape of completions."""
        return CompletionLogprobs(
            tokens=[_name(each.chosen.token_bytes) for each in logprobs],
            token_logprobs=[_finite(each.chosen) for each in logprobs],
            top_logprobs=[_top(each) for each in logprobs],
            text_offset=[self._advance(each.chosen.token_bytes) for each in logprobs],
        )

    def write_prompt(self, part: PromptLogprobs, num_top: int) -> CompletionLogprobs:
        """Return the next tokens of a prompt, which come before the answer's."""
        following = self._first(part.first[1]) if part.first is not None else self.write(())
        following.extend(self.write([_cut(each, num_top) for each, _ in part.positions()]))
        return following

    def fork(self) -> "LogprobsWriter":
        """Return a writer that goes on from here for another answer to the same prompt."""
        other = LogprobsWriter()
        other._utf8.setstate(self._utf8.getstate())
        other._num_characters = self._num_characters
        return other

    def _first(self, token_bytes: bytes) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[_name(token_bytes)],
            token_logprobs=[None],
            top_logprobs=[None],
            text_offset=[self._advance(token_bytes)],
        )

    def _advance(self, token_bytes: bytes) -> int:
        """Return the offset of a token, and move past it."""
        offset = self._num_characters
        self._num_characters += len(self._utf8.decode(token_bytes))
        return offset


class PromptToken(BaseModel):
    """A token at a position of the prompt."""

    logprob: float
    rank: int = Field(description="Its place among all tokens by their probability, from 1.")
    decoded_token: str = Field(description="Bytes that are no whole character are U+FFFD.")

    @classmethod
    def of(cls, token: TokenLogprob, rank: int) -> Self:
        """Return a token in vLLM's shape."""
        return cls(logprob=_finite(token), rank=rank, decoded_token=token.text)


PromptPositions = list[dict[str, PromptToken] | None]
"""A prompt's own token and the likeliest ones at each position, by their ids; None at the first."""


async def prompt_positions(
    parts: Sequence[PromptLogprobs], num_top: int | None
) -> PromptPositions | None:
    """Return the log-probabilities of a prompt's tokens in vLLM's shape.

    Other requests go on between two parts: a prompt may be long.

    Args:
        parts: All parts of the prompt, in order.
        num_top: How many of the likeliest tokens to write at each position; None: nothing is asked
            for, and nothing returned.
    """
    if num_top is None:
        return None
    written: PromptPositions = []
    for part in parts:
        written += [] if part.first is None else [None]
        written += [_position(_cut(each, num_top), rank) for each, rank in part.positions()]
        await asyncio.sleep(0)
    return written


def _position(tokens: TokenLogprobs, rank: int) -> dict[str, PromptToken]:
    written = {str(tokens.chosen.token_id): PromptToken.of(tokens.chosen, rank)}
    for place, likely in enumerate(tokens.top, start=1):
        written.setdefault(str(likely.token_id), PromptToken.of(likely, place))
    return written


def _cut(tokens: TokenLogprobs, num_top: int) -> TokenLogprobs:
    """Return no more of the likeliest tokens than asked for: another field may ask for more."""
    return replace(tokens, top=tokens.top[:num_top])


def _top(token: TokenLogprobs) -> dict[str, float]:
    # Two tokens may have the same name; the likelier one, which comes first, keeps it.
    likely = reversed((*token.top, token.chosen))
    top = {_name(each.token_bytes): _finite(each) for each in likely}
    return dict(reversed(top.items()))


def _name(token_bytes: bytes) -> str:
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _finite(token: TokenLogprob) -> float:
    return max(token.logprob, LOGPROB_OF_THE_IMPOSSIBLE)
