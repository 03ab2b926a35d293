"""`POST /v1/classify`, and vLLM's `/classify`: a text in, labels out, in one JSON answer.

The answer counts as one content event, so TTFT equals E2E. There are no output tokens; reports show
chunks instead.
"""

from collections.abc import Mapping
from typing import Any

from loadtest.client.contract import (
    BodySettings,
    Call,
    Delta,
    MalformedAnswerError,
    Usage,
    error_of,
    json_object,
    shortened,
    text_only,
    usage_of,
)
from loadtest.client.sse import ServerSentEvent


class Classify:
    """A classifier: one text per request."""

    name = "classify"
    media_type: str | None = "application/json"
    ends_by_closing = False

    def __init__(self, settings: BodySettings, extra: Mapping[str, Any]) -> None:
        """Use the model of `settings` only; the others are for generation."""
        self._shared = {"model": settings.model} if settings.model else {}
        self._extra = dict(extra)

    def body(self, call: Call) -> Any:
        """Return the text to classify."""
        return {"input": text_only(call, self.name), **self._shared, **self._extra}

    def read_event(self, event: ServerSentEvent) -> Delta:
        """Refuse the event: an answer is JSON."""
        raise MalformedAnswerError(f"a stream of events instead of JSON: {shortened(event.data)}")

    def read_whole(self, body: str) -> Delta:
        """Parse the labels."""
        payload = json_object(body)
        if (error := error_of(payload)) is not None:
            return Delta(error=error)
        data = payload.get("data")
        if not isinstance(data, list):
            raise MalformedAnswerError(f"an answer without data: {shortened(body)}")
        labels = ", ".join(str(each.get("label")) for each in data if isinstance(each, dict))
        counted = usage_of(payload)
        usage = Usage(counted.prompt_tokens, counted.cached_tokens, None) if counted else None
        return Delta(text=labels, usage=usage, is_done=True)
