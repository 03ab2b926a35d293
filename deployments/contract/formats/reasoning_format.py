"""How families of models mark their reasoning, as data; the names are vLLM's.

Reasoning is one block at the beginning of an answer, between two marks. Each mark is one token. A
chat template may end the prompt with the first mark, so that the answer begins with the reasoning,
or with an empty block, so that there is none.

gpt-oss writes messages on channels (harmony), of which `analysis` is reasoning. The mark is in
front of every message's channel, and only the channel's name tells reasoning.

Source: the chat templates of Qwen3, DeepSeek-R1 and gpt-oss on https://huggingface.co.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class PromptReasoning(StrEnum):
    """What a prompt's end says about the reasoning that follows."""

    OPEN = "open"
    """Nothing: the model reasons if it begins with the mark."""
    BEGUN = "begun"
    """The answer begins with reasoning."""
    ENDED = "ended"
    """The answer has no reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """One way to mark reasoning.

    Attributes:
        name: vLLM's name of the parser.
        start: The mark before the reasoning.
        end: The mark after it.
        is_assumed: Whether an answer begins with reasoning even if neither the prompt nor the model
            writes `start`.
        channel: The token after `start` that makes the text reasoning, in a format with channels;
            None in others, where `start` alone does.
    """

    name: str
    start: str = "<think>"
    end: str = "</think>"
    is_assumed: bool = False
    channel: str | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, each of which must be one token."""
        return (self.start, self.end, *([] if self.channel is None else [self.channel]))

    def at_end_of(self, prompt: str) -> PromptReasoning:
        """Return what the end of a rendered prompt says; a client's text can't be there."""
        told = prompt.rstrip()
        if told.endswith(self.end):
            return PromptReasoning.ENDED
        if self.is_assumed or told.endswith(self.start):
            return PromptReasoning.BEGUN
        return PromptReasoning.OPEN


QWEN3 = ReasoningFormat(name="qwen3")
DEEPSEEK_R1 = ReasoningFormat(name="deepseek_r1", is_assumed=True)
OPENAI_GPTOSS = ReasoningFormat(
    name="openai_gptoss", start="<|channel|>", end="<|end|>", channel="analysis"
)

REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {known.name: known for known in (QWEN3, DEEPSEEK_R1, OPENAI_GPTOSS)}
)
"""All formats, by name."""
