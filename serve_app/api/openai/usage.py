"""The tokens of a request, as OpenAI counts them.

A prompt counts once, however many answers it has. Its cached tokens are the tokens that no answer
computed. Later answers also reuse the tokens that the first one computed; that saves time, but they
were not cached when the request arrived, so they don't count as cached.
"""

from collections import defaultdict
from typing import Self

from pydantic import BaseModel, Field

from deployments.contract.output import TextDelta
from serve_app.api.reasoning.separation import ReasoningCounter, Separation
from serve_app.backends.streams.choices import Choices


class PromptTokensDetails(BaseModel):
    """How many of the prompt's tokens were cached."""

    cached_tokens: int = Field(
        description="Tokens reused from an earlier request with the same beginning, not computed."
    )


class CompletionTokensDetails(BaseModel):
    """How many of the answer's tokens are reasoning."""

    reasoning_tokens: int = Field(description="Tokens of the reasoning, its marks included.")


class Usage(BaseModel):
    """Tokens, counted by the replica."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(
        default=None,
        exclude_if=lambda details: details is None,
        description="Absent if the model's reasoning is not separated from its answers.",
    )

    @classmethod
    def of(
        cls,
        num_prompt_tokens: int,
        num_completion_tokens: int,
        num_cached_tokens: int,
        num_reasoning_tokens: int | None = None,
    ) -> Self:
        """Return the usage of these counts; None: no reasoning is separated."""
        return cls(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
            completion_tokens_details=None
            if num_reasoning_tokens is None
            else CompletionTokensDetails(reasoning_tokens=num_reasoning_tokens),
        )


class UsageTally:
    """Counts the tokens of a request's answers as they arrive."""

    def __init__(self, choices: Choices, reasoning: Separation | None = None) -> None:
        """Start with the prompts' tokens.

        Args:
            choices: The answers.
            reasoning: How their reasoning is separated; None if it is not.
        """
        self._reasoning = reasoning
        self._counters: dict[int, ReasoningCounter] = {}
        self._num_prompt_tokens = choices.num_prompt_tokens
        self._num_per_prompt = choices.num_per_prompt
        self._num_tokens = 0
        self._num_cached: defaultdict[int, int] = defaultdict(int)

    def add(self, choice_index: int, delta: TextDelta) -> None:
        """Count a delta of one answer."""
        self._num_tokens += len(delta.token_ids)
        self._num_cached[choice_index] += delta.num_cached_tokens
        if self._reasoning is not None:
            if choice_index not in self._counters:
                self._counters[choice_index] = self._reasoning.counter()
            self._counters[choice_index].add(delta.token_ids)

    def usage(self) -> Usage:
        """Return the usage so far."""
        by_prompt: defaultdict[int, list[int]] = defaultdict(list)
        for index, num_cached in self._num_cached.items():
            by_prompt[index // self._num_per_prompt].append(num_cached)
        num_cached = sum(map(min, by_prompt.values()))
        num_reasoning = sum(counter.num_tokens for counter in self._counters.values())
        return Usage.of(
            self._num_prompt_tokens,
            self._num_tokens,
            num_cached,
            None if self._reasoning is None else num_reasoning,
        )


async def read_with_usage(
    choices: Choices, reasoning: Separation | None = None
) -> tuple[list[TextDelta], Usage]:
    """Read all answers to their ends and return each as one delta, and the usage of them all.

    Args:
        choices: The answers.
        reasoning: How their reasoning is separated; None if it is not.

    Raises:
        RaystreamError: An answer failed.
    """
    tally = UsageTally(choices, reasoning)
    answers = await choices.read_to_end()
    for index, answer in enumerate(answers):
        tally.add(index, answer)
    return answers, tally.usage()
