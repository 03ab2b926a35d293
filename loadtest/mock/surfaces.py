"""What the mock writes on each route: the payloads of a stream, or one answer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, Protocol

from loadtest.mock.script import Behaviour

MODEL: Final = "mock"
NUM_PROMPT_TOKENS: Final = 8
WORD: Final = "word "


class Surface(Protocol):
    """A route's payloads; None leaves an event out."""

    def opening(self) -> Mapping[str, Any] | None:
        """Return what comes before the first content event."""
        ...

    def content(self, behaviour: Behaviour, index: int) -> Mapping[str, Any]:
        """Return a content event."""
        ...

    def finish(self) -> Mapping[str, Any] | None:
        """Return what says that the answer is complete."""
        ...

    def usage(self, num_tokens: int) -> Mapping[str, Any] | None:
        """Return what tells the answer's tokens."""
        ...


def usage_of(num_tokens: int) -> dict[str, int]:
    """Return OpenAI's `usage`."""
    return {
        "prompt_tokens": NUM_PROMPT_TOKENS,
        "completion_tokens": num_tokens,
        "total_tokens": NUM_PROMPT_TOKENS + num_tokens,
    }


class _OpenAiSurface(ABC):
    """What chat completions and completions have in common."""

    object_name: str

    def usage(self, num_tokens: int) -> Mapping[str, Any] | None:
        return {**self._head(), "choices": [], "usage": usage_of(num_tokens)}

    def content(self, behaviour: Behaviour, index: int) -> Mapping[str, Any]:
        chunk = self._chunk(WORD * behaviour.tokens_per_event)
        if behaviour.tells_usage_so_far:
            chunk["usage"] = usage_of((index + 1) * behaviour.tokens_per_event)
        return chunk

    def _head(self) -> dict[str, Any]:
        return {"id": "mock-1", "object": self.object_name, "created": 1, "model": MODEL}

    def _chunk(self, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, **self._text(text), "finish_reason": finish_reason}
        return {**self._head(), "choices": [choice]}

    @abstractmethod
    def _text(self, text: str) -> dict[str, Any]: ...


class ChatSurface(_OpenAiSurface):
    """`/v1/chat/completions`."""

    object_name = "chat.completion.chunk"

    def opening(self) -> Mapping[str, Any] | None:
        """Return the role, which is no content."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        return {**self._head(), "choices": [choice]}

    def finish(self) -> Mapping[str, Any] | None:
        """Return an empty delta with a reason."""
        choice = {"index": 0, "delta": {}, "finish_reason": "length"}
        return {**self._head(), "choices": [choice]}

    def _text(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}


class CompletionsSurface(_OpenAiSurface):
    """`/v1/completions`."""

    object_name = "text_completion"

    def opening(self) -> Mapping[str, Any] | None:
        """Return nothing: the text comes at once."""
        return None

    def finish(self) -> Mapping[str, Any] | None:
        """Return an empty text with a reason."""
        return self._chunk("", "length")

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}


class TextGenerationSurface:
    """`/text-generation`: each event counts its own tokens, and `[DONE]` alone ends them."""

    def opening(self) -> Mapping[str, Any] | None:
        """Return nothing: the text comes at once."""
        return None

    def content(self, behaviour: Behaviour, index: int) -> Mapping[str, Any]:
        """Return a piece of text with its tokens."""
        num_tokens = behaviour.tokens_per_event
        return {
            "text": WORD * num_tokens,
            "token_count": num_tokens,
            "total_token_count": (index + 1) * num_tokens,
            "token_rate": 1.0,
        }

    def finish(self) -> Mapping[str, Any] | None:
        """Return nothing."""
        return None

    def usage(self, num_tokens: int) -> Mapping[str, Any] | None:
        """Return nothing: each event has told its own."""
        return None


STREAMS: Final[Mapping[str, Surface]] = {
    "/v1/chat/completions": ChatSurface(),
    "/v1/completions": CompletionsSurface(),
    "/text-generation": TextGenerationSurface(),
}
"""The routes that stream."""

CLASSIFY_ROUTES: Final = ("/v1/classify", "/classify")


def classification() -> dict[str, Any]:
    """Return the answer of `/v1/classify`."""
    return {
        "object": "list",
        "model": MODEL,
        "data": [{"index": 0, "label": "mock", "scores": [{"label": "mock", "score": 1.0}]}],
        "usage": {**usage_of(0)},
    }
