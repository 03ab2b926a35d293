"""Splits an answer's text into reasoning and content as it arrives.

The reasoning is one block at the beginning; whatever follows it is content. Text is held back while
it may be the beginning of a mark. The marks, and the line breaks next to them, belong to neither
part.

The states: BEGINNING looks for the first mark; REASONING for the second; GAP skips line breaks;
CONTENT is everything to the end.
"""

from dataclasses import dataclass
from enum import Enum, auto

from deployments.contract.formats.reasoning_format import PromptReasoning, ReasoningFormat
from serve_app.api.partial_match import num_overlapping

BREAKS = "\n"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of an answer's reasoning; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class SplitText:
    """A part of an answer; the reasoning comes first."""

    reasoning: str = ""
    content: str = ""

    def __add__(self, other: "SplitText") -> "SplitText":
        """Append the part that follows."""
        return SplitText(self.reasoning + other.reasoning, self.content + other.content)


class _State(Enum):
    BEGINNING = auto()
    REASONING = auto()
    GAP = auto()
    CONTENT = auto()


class ReasoningParser:
    """Splits one answer."""

    def __init__(self, known: ReasoningFormat, prompt: PromptReasoning) -> None:
        """Start before the answer.

        Args:
            known: How the model marks its reasoning.
            prompt: What the end of the prompt says about it.
        """
        self._format = known
        self._has_begun = prompt is PromptReasoning.BEGUN
        self._state = _State.CONTENT if prompt is PromptReasoning.ENDED else _State.BEGINNING
        self._pending = ""  # text that has arrived, but was not told yet
        self._has_told = False

    def feed(self, text: str) -> SplitText:
        """Take more of the answer's text, and return what is certain now."""
        if self._state is _State.CONTENT:
            return SplitText(content=text)
        self._pending += text
        reasoning = content = ""
        if self._state is _State.BEGINNING:
            self._begin()
        if self._state is _State.REASONING:
            reasoning = self._read_reasoning()
        if self._state is _State.GAP:
            self._pending = self._pending.lstrip(BREAKS)
            if self._pending:
                self._state = _State.CONTENT
        if self._state is _State.CONTENT:
            content, self._pending = self._pending, ""
        return SplitText(reasoning, content)

    def finish(self) -> SplitText:
        """End the answer and return the text that was held back."""
        left, self._pending = self._pending, ""
        if self._state is _State.REASONING or (self._state is _State.BEGINNING and self._has_begun):
            return SplitText(reasoning=left.rstrip(BREAKS))
        return SplitText(content=left)

    def _begin(self) -> None:
        """Pass the first mark; some models write it although the prompt has it already."""
        start = self._format.start
        text = self._pending.lstrip(BREAKS) if self._has_begun else self._pending
        if text.startswith(start):
            self._pending = text.removeprefix(start)
            self._state = _State.REASONING
        elif not start.startswith(text):
            self._state = _State.REASONING if self._has_begun else _State.CONTENT

    def _read_reasoning(self) -> str:
        if not self._has_told:
            self._pending = self._pending.lstrip(BREAKS)
        end = self._format.end
        found, mark, rest = self._pending.partition(end)
        if mark:
            self._state, self._pending = _State.GAP, rest
            return found.rstrip(BREAKS)
        told = found[: len(found) - num_overlapping(found, end)].rstrip(BREAKS)
        self._pending = found[len(told) :]
        self._has_told = self._has_told or bool(told)
        return told
