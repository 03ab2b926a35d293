"""`POST /text-generation`: events with text and token counts, ended by `[DONE]`."""

from collections.abc import Mapping
from typing import Any

from loadtest.apis.openai import EVENT_STREAM
from loadtest.client.contract import (
    BodySettings,
    Call,
    Delta,
    MalformedAnswerError,
    messages_of,
    payload_of,
    shortened,
)
from loadtest.client.sse import ServerSentEvent


class TextGeneration:
    """`{"messages"}` in, `{"text", "token_count", "total_token_count", "token_rate"}` out."""

    name = "text-generation"
    media_type: str | None = EVENT_STREAM
    ends_by_closing = False

    def __init__(self, settings: BodySettings, extra: Mapping[str, Any]) -> None:
        """Prepare the fields of every body; the fields of `extra` override the others."""
        self._settings = settings
        self._extra = dict(extra)

    def body(self, call: Call) -> Any:
        """Return the body: the question as messages, and the user."""
        user = {"user_id": call.user} if call.user else {}
        return {
            "messages": messages_of(call),
            "stream": True,
            **self._settings.fields(),
            **user,
            **self._extra,
        }

    def read_event(self, event: ServerSentEvent) -> Delta:
        """Parse a text with its token count, the end, or an error; read past other events."""
        payload = payload_of(event)
        if isinstance(payload, Delta):
            return payload
        text, num_tokens = payload.get("text"), payload.get("token_count")
        if text is None:
            return Delta(oddity="an event without text")
        if not isinstance(text, str):
            raise MalformedAnswerError(f"a text that is none: {shortened(event.data)}")
        is_count = isinstance(num_tokens, int) and num_tokens >= 0
        return Delta(text=text, num_tokens=num_tokens if is_count else None)

    def read_whole(self, body: str) -> Delta:
        """Refuse the answer: a stream was requested."""
        raise MalformedAnswerError(f"not a stream of events: {shortened(body)}")
