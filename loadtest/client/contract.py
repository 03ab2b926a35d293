"""The contract between the sender and a kind of server: how to make a body and parse events.

An API keeps no state between events, so one object serves all requests of a run.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pydantic_core import from_json

from loadtest.client.sse import ServerSentEvent

DONE = "[DONE]"
"""The data of the event that ends an answer."""

PING = "ping"
"""The name of events that only keep a connection open, as Anthropic's API has them."""

CUT_OFF = "..."
"""Marks the end of a shortened text."""


class MalformedAnswerError(ValueError):
    """An answer does not have the API's form; the message says what came instead."""


class UnsuitableCallError(ValueError):
    """A question does not fit this API's body; the message says why."""


class Usage(NamedTuple):
    """The server's token counts since the start of the answer."""

    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None


class Delta(NamedTuple):
    """The meaning of an event.

    Attributes:
        text: The text that the event adds; an event with text is a content event.
        num_tokens: The event's own tokens, if the server counts per event.
        usage: The answer's tokens so far, if the server sends them.
        finish_reason: Why the answer is complete, if it is.
        is_done: Whether this is the last event.
        error: The server's error message.
        oddity: What the API does not have and the event has; such an event is read past.
    """

    text: str = ""
    num_tokens: int | None = None
    usage: Usage | None = None
    finish_reason: str | None = None
    is_done: bool = False
    error: str | None = None
    oddity: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """The content of one request.

    Attributes:
        text: The question; in a conversation, the last message's text.
        messages: The whole conversation, if the data file has one.
        image_url: A `data:` URI, if an image is sent.
        user: The user name; "" for none.
        index: The request's number within its level.
    """

    text: str
    messages: tuple[Mapping[str, Any], ...] | None = None
    image_url: str | None = None
    user: str = ""
    index: int = 0


@dataclass(frozen=True, slots=True)
class BodySettings:
    """The settings in every body; None leaves a choice to the server."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None

    def fields(self) -> dict[str, Any]:
        """Return the settings that are not None, by OpenAI's field names."""
        given = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        return {name: value for name, value in given.items() if value is not None}


class Api(Protocol):
    """A kind of server.

    Attributes:
        name: As `--api` names it.
        media_type: The media type that answers must have; None allows an event stream or JSON.
        ends_by_closing: Whether an answer is complete when the stream ends, without a last event.
    """

    name: str
    media_type: str | None
    ends_by_closing: bool

    def body(self, call: Call) -> Any:
        """Return the request body, to be sent as JSON.

        Raises:
            UnsuitableCallError: This API can't ask what the call asks.
        """
        ...

    def read_event(self, event: ServerSentEvent) -> Delta:
        """Parse an event.

        Raises:
            MalformedAnswerError: The event does not have the API's form.
        """
        ...

    def read_whole(self, body: str) -> Delta:
        """Parse an answer that is not a stream.

        Raises:
            MalformedAnswerError: The answer does not have the API's form.
        """
        ...


def messages_of(call: Call) -> list[Mapping[str, Any]]:
    """Return the call as messages; an image is added to the last one."""
    messages = list(call.messages or ({"role": "user", "content": call.text},))
    if call.image_url is not None:
        image = {"type": "image_url", "image_url": {"url": call.image_url}}
        messages[-1] = {**messages[-1], "content": [{"type": "text", "text": call.text}, image]}
    return messages


def text_only(call: Call, api_name: str) -> str:
    """Return the question for an API that accepts only a text.

    Raises:
        UnsuitableCallError: The call has an image or a conversation.
    """
    if call.image_url is not None:
        raise UnsuitableCallError(f"{api_name} accepts no images; use openai-chat")
    if call.messages is not None and len(call.messages) > 1:
        raise UnsuitableCallError(f"{api_name} accepts a text but no conversation; use openai-chat")
    return call.text


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        MalformedAnswerError: The text is not one.
    """
    try:
        value = from_json(text)
    except ValueError as error:
        raise MalformedAnswerError(f"not JSON ({error}): {shortened(text)}") from None
    if not isinstance(value, dict):
        raise MalformedAnswerError(f"JSON, but not an object: {shortened(text)}")
    return value


def error_of(payload: Mapping[str, Any]) -> str | None:
    """Return the message of a payload's `error`, whatever its shape; None without one."""
    error = payload.get("error")
    if not error:
        return None
    if isinstance(error, dict):
        error = error.get("message") or error
    return shortened(str(error))


def error_event_message(data: str) -> str:
    """Return the message of an event named `error`: from its JSON, or else its text."""
    with suppress(MalformedAnswerError):
        if (message := error_of(json_object(data))) is not None:
            return message
    return shortened(data) or "an event named error, without a message"


def oddity_of(event: ServerSentEvent) -> str | None:
    """Return in words what keeps a connection open in the guise of an event; None for others."""
    if event.name == PING:
        return "an event named ping"
    data = event.data.strip()
    if not data:
        return "an event with empty data"
    return "a comment as data" if data.startswith(":") else None


def payload_of(event: ServerSentEvent) -> dict[str, Any] | Delta:
    """Return an event's JSON object, or a `Delta` if the event is the end, an error or odd.

    Raises:
        MalformedAnswerError: The event's data is not a JSON object.
    """
    if event.data.strip() == DONE:
        return Delta(is_done=True)
    if event.name == "error":
        return Delta(error=error_event_message(event.data))
    if (oddity := oddity_of(event)) is not None:
        return Delta(oddity=oddity)
    payload = json_object(event.data)
    if (error := error_of(payload)) is not None:
        return Delta(error=error)
    return payload


def usage_of(payload: Mapping[str, Any]) -> Usage | None:
    """Parse OpenAI's `usage`; missing or invalid counts are None."""
    usage = payload.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        _count(usage.get("prompt_tokens")), _count(cached), _count(usage.get("completion_tokens"))
    )


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_count else None


def shortened(text: str, max_chars: int = 200) -> str:
    """Return a text as one line, cut after `max_chars` characters."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else f"{line[:max_chars]}{CUT_OFF}"
