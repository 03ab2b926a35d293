"""OpenAI's two streams: chat completions and completions.

Source: https://platform.openai.com/docs/api-reference/chat-streaming
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Final

from loadtest.client.contract import (
    BodySettings,
    Call,
    Delta,
    MalformedAnswerError,
    messages_of,
    payload_of,
    shortened,
    text_only,
    usage_of,
)
from loadtest.client.sse import ServerSentEvent

EVENT_STREAM: Final = "text/event-stream"

_TEXT_FIELDS: Final = ("content", "reasoning_content", "reasoning", "refusal")
"""Fields of a chat's delta; vLLM and others stream a model's reasoning in separate ones."""


class _OpenAiStream(ABC):
    """The common part of chat completions and completions."""

    media_type: str | None = EVENT_STREAM
    ends_by_closing = False

    def __init__(self, settings: BodySettings, extra: Mapping[str, Any]) -> None:
        """Prepare the fields of every body.

        Args:
            settings: The model and the sampling settings.
            extra: Fields that override the body's, such as `ignore_eos`.
        """
        self._shared = {
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings.fields(),
        }
        self._extra = dict(extra)

    def body(self, call: Call) -> Any:
        """Return the body, which asks for usage."""
        user = {"user": call.user} if call.user else {}
        return {**self._asked(call), **self._shared, **user, **self._extra}

    def read_event(self, event: ServerSentEvent) -> Delta:
        """Parse a chunk, the end, or an error; read past what OpenAI's SDKs read past."""
        payload = payload_of(event)
        if isinstance(payload, Delta):
            return payload
        text, finish_reason = "", None
        choices = payload.get("choices")
        if choices is not None and not isinstance(choices, list):
            raise MalformedAnswerError(f"choices that are no list: {shortened(event.data)}")
        for choice in choices or ():
            if not isinstance(choice, dict):
                continue
            text += "".join(self._texts(choice))
            reason = choice.get("finish_reason")
            # Some servers send "" for "not finished"; taken as a reason, it would hide a
            # truncation.
            finish_reason = reason if reason and isinstance(reason, str) else finish_reason
        oddity = "a chunk without choices" if choices is None else None
        return Delta(text=text, usage=usage_of(payload), finish_reason=finish_reason, oddity=oddity)

    def read_whole(self, body: str) -> Delta:
        """Refuse the answer: a stream was requested."""
        raise MalformedAnswerError(f"not a stream of events: {shortened(body)}")

    @abstractmethod
    def _asked(self, call: Call) -> Mapping[str, Any]: ...

    @abstractmethod
    def _texts(self, choice: Mapping[str, Any]) -> Iterator[str]: ...


class OpenAiChat(_OpenAiStream):
    """`POST /v1/chat/completions`."""

    name = "openai-chat"

    def _asked(self, call: Call) -> Mapping[str, Any]:
        return {"messages": messages_of(call)}

    def _texts(self, choice: Mapping[str, Any]) -> Iterator[str]:
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return
        for name in _TEXT_FIELDS:
            if isinstance(text := delta.get(name), str):
                yield text
        if calls := delta.get("tool_calls"):
            yield from _call_texts(calls)


def _call_texts(calls: Any) -> Iterator[str]:
    """Yield the names and arguments of tool calls, which are the model's output too."""
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        for value in function.values() if isinstance(function, dict) else ():
            if isinstance(value, str):
                yield value


class OpenAiCompletions(_OpenAiStream):
    """`POST /v1/completions`."""

    name = "openai-completions"

    def _asked(self, call: Call) -> Mapping[str, Any]:
        return {"prompt": text_only(call, self.name)}

    def _texts(self, choice: Mapping[str, Any]) -> Iterator[str]:
        if isinstance(text := choice.get("text"), str):
            yield text
