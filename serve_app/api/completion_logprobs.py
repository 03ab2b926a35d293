"""How likely the tokens of a completion were, in the older shape: four lists side by side.

Source: https://platform.openai.com/docs/api-reference/completions/object (choices, logprobs)
"""

import codecs
from collections.abc import Sequence

from pydantic import BaseModel, Field

from deployments.contract import TokenLogprob, TokenLogprobs
from serve_app.api.chat_logprobs import LOGPROB_OF_THE_IMPOSSIBLE


class CompletionLogprobs(BaseModel):
    """The tokens of an answer or of a piece of it, an entry for each in every list."""

    tokens: list[str] = Field(description="Of bytes that make no whole character: 'bytes:\\xe2'.")
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] = Field(
        description="The likeliest tokens at each place, and the one that was chosen."
    )
    text_offset: list[int] = Field(description="Characters of the tokens before this one.")


class LogprobsWriter:
    """Tells the tokens of one answer, piece by piece; it counts the characters as they go by."""

    def __init__(self) -> None:
        """Start before the first token."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_characters = 0

    def tell(self, logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Return what is told of the next tokens."""
        return CompletionLogprobs(
            tokens=[_name(told.chosen) for told in logprobs],
            token_logprobs=[_finite(told.chosen) for told in logprobs],
            top_logprobs=[_top(told) for told in logprobs],
            text_offset=[self._pass(told.chosen) for told in logprobs],
        )

    def _pass(self, token: TokenLogprob) -> int:
        offset = self._num_characters
        self._num_characters += len(self._utf8.decode(token.token_bytes))
        return offset


def _top(told: TokenLogprobs) -> dict[str, float]:
    # Two tokens may have one name; the likelier one, which comes first, keeps it.
    top = {_name(likely): _finite(likely) for likely in reversed((*told.top, told.chosen))}
    return dict(reversed(top.items()))


def _name(token: TokenLogprob) -> str:
    try:
        return token.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)


def _finite(token: TokenLogprob) -> float:
    return max(token.logprob, LOGPROB_OF_THE_IMPOSSIBLE)
