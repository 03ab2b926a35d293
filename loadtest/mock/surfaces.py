"""The payloads of the mock's routes: the events of a stream, or one answer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, Protocol

from loadtest.mock.script import Behaviour

MODEL: Final = "mock"
NUM_PROMPT_TOKENS: Final = 8
WORD: Final = "word "


class Surface(Protocol):
    """The events of a streaming route; None means that the route has no such event."""

    def opening(self) -> Mapping[str, Any] | None:
        """Return the event before the first content event."""
        ...

    def content(self, behaviour: Behaviour, index: int) -> Mapping[str, Any]:
        """Return a content event."""
        ...

    def finish(self) -> Mapping[str, Any] | None:
        """Return the event that marks the answer as complete."""
        ...

    def usage(self, num_tokens: int) -> Mapping[str, Any] | None:
        """Return the event with the answer's token counts."""
        ...


def usage_of(num_tokens: int) -> dict[str, int]:
    """Return OpenAI's `usage`."""
    return {
        "prompt_tokens": NUM_PROMPT_TOKENS,
        "completion_tokens": num_tokens,
        "total_tokens": NUM_PROMPT_TOKENS + num_tokens,
    }


class _OpenAiSurface(ABC):
    """The common part of chat completions and completions."""

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
        """Return the role, which is not content."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        return {**self._head(), "choices": [choice]}

    def finish(self) -> Mapping[str, Any] | None:
        """Return an empty delta with a finish reason."""
        choice = {"index": 0, "delta": {}, "finish_reason": "length"}
        return {**self._head(), "choices": [choice]}

    def _text(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}


class CompletionsSurface(_OpenAiSurface):
    """`/v1/completions`."""

    object_name = "text_completion"

    def opening(self) -> Mapping[str, Any] | None:
        """Return nothing: the first event has text."""
        return None

    def finish(self) -> Mapping[str, Any] | None:
        """Return an empty text with a finish reason."""
        return self._chunk("", "length")

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}


class TextGenerationSurface:
    """`/text-generation`: each event has its own token count; only `[DONE]` ends the stream."""

    def opening(self) -> Mapping[str, Any] | None:
        """Return nothing: the first event has text."""
        return None

    def content(self, behaviour: Behaviour, index: int) -> Mapping[str, Any]:
        """Return a text with its token count."""
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
        """Return nothing: each event has its own count."""
        return None


STREAMS: Final[Mapping[str, Surface]] = {
    "/v1/chat/completions": ChatSurface(),
    "/v1/completions": CompletionsSurface(),
    "/text-generation": TextGenerationSurface(),
}
"""The streaming routes."""

CLASSIFY_ROUTES: Final = ("/v1/classify", "/classify")


def classification() -> dict[str, Any]:
    """Return the answer of `/v1/classify`."""
    return {
        "object": "list",
        "model": MODEL,
        "data": [{"index": 0, "label": "mock", "scores": [{"label": "mock", "score": 1.0}]}],
        "usage": {**usage_of(0)},
    }
