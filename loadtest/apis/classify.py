"""`POST /v1/classify`, and `/classify` as vLLM has it: a text in, labels out, in one piece.

The answer counts as one content event, so TTFT and E2E are the same; there are no output tokens,
and what is printed of them is chunks.
"""

from collections.abc import Mapping
from typing import Any

from loadtest.apis.contract import (
    BodySettings,
    Call,
    Delta,
    MalformedAnswerError,
    Usage,
    error_of,
    json_object,
    shortened,
    text_alone,
    usage_of,
)
from loadtest.sse import ServerSentEvent


class Classify:
    """A classifier: one text for each request."""

    name = "classify"
    media_type: str | None = "application/json"
    ends_by_closing = False

    def __init__(self, settings: BodySettings, extra: Mapping[str, Any]) -> None:
        """Keep the model; what else generates text means nothing here."""
        self._shared = {"model": settings.model} if settings.model else {}
        self._extra = dict(extra)

    def body(self, call: Call) -> Any:
        """Return the text to classify."""
        return {"input": text_alone(call, self.name), **self._shared, **self._extra}

    def read_event(self, event: ServerSentEvent) -> Delta:
        """Refuse it: an answer comes in one piece."""
        raise MalformedAnswerError(f"a stream of events: {shortened(event.data)}")

    def read_whole(self, body: str) -> Delta:
        """Read the labels."""
        payload = json_object(body)
        if (error := error_of(payload)) is not None:
            return Delta(error=error)
        data = payload.get("data")
        if not isinstance(data, list):
            raise MalformedAnswerError(f"an answer without data: {shortened(body)}")
        labels = ", ".join(str(each.get("label")) for each in data if isinstance(each, dict))
        told = usage_of(payload)
        usage = Usage(told.prompt_tokens, told.cached_tokens, None) if told else None
        return Delta(text=labels, usage=usage, is_done=True)
