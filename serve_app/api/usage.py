"""What a request has cost in tokens, as OpenAI counts it.

A prompt counts once, however many answers it gets. Of its tokens, those are told as cached that no
answer had computed: with several answers the later ones find what the first has left, which saves
time, but was not there when the request came.
"""

from collections import defaultdict
from typing import Self

from pydantic import BaseModel, Field

from serve_app.choices import Choices
from serve_app.generation import Piece


class PromptTokensDetails(BaseModel):
    """What became of the prompt's tokens."""

    cached_tokens: int = Field(
        description="Taken over from an earlier request that began alike, and not computed."
    )


class Usage(BaseModel):
    """Tokens, counted by the replica."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> Self:
        """Return the usage with its sum."""
        return cls(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
        )


class UsageTally:
    """Counts the tokens of a request's answers as they come."""

    def __init__(self, choices: Choices) -> None:
        """Start with the prompts of these answers."""
        self._num_prompt_tokens = choices.num_prompt_tokens
        self._num_per_prompt = choices.num_per_prompt
        self._num_tokens = 0
        self._num_cached: defaultdict[int, int] = defaultdict(int)

    def add(self, piece: Piece) -> None:
        """Count a piece of any answer."""
        self._num_tokens += piece.num_tokens
        self._num_cached[piece.choice_index] += piece.num_cached_tokens

    def usage(self) -> Usage:
        """Return the usage so far."""
        by_prompt: defaultdict[int, list[int]] = defaultdict(list)
        for index, num_cached in self._num_cached.items():
            by_prompt[index // self._num_per_prompt].append(num_cached)
        num_cached = sum(map(min, by_prompt.values()))
        return Usage.of(self._num_prompt_tokens, self._num_tokens, num_cached)
