"""What every kind of server is to the sender: a body to send, and events to make sense of.

An API keeps no state between events, so one object serves all requests of a run.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pydantic_core import from_json

from loadtest.sse import ServerSentEvent

DONE = "[DONE]"
"""The data of the event behind which nothing of the answer comes."""

CUT_OFF = "..."
"""What stands behind a text that was shortened."""


class MalformedAnswerError(ValueError):
    """What came is not in the API's form; the message says what it is instead."""


class UnsuitableCallError(ValueError):
    """A question can't be put into this API's body; the message says why."""


class Usage(NamedTuple):
    """What the server has counted, from the answer's start up to here."""

    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None


class Delta(NamedTuple):
    """What an event says.

    Attributes:
        text: What it adds to the answer; it is a content event if there is any.
        num_tokens: The tokens that it alone carries, if the server counts them so.
        usage: The answer's tokens so far, if the server tells.
        finish_reason: Why the answer is complete, if it is.
        is_done: Nothing comes after it.
        error: What the server says went wrong.
    """

    text: str = ""
    num_tokens: int | None = None
    usage: Usage | None = None
    finish_reason: str | None = None
    is_done: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """What one request asks.

    Attributes:
        text: The question; the last message's text where there are several.
        messages: All of a conversation, if the data file has one.
        image_url: A `data:` URI, if an image goes along.
        user: Who asks.
        index: The request's number within its level.
    """

    text: str
    messages: tuple[Mapping[str, Any], ...] | None = None
    image_url: str | None = None
    user: str = ""
    index: int = 0


@dataclass(frozen=True, slots=True)
class BodySettings:
    """What goes into every body alike; None leaves it to the server."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None

    def fields(self) -> dict[str, Any]:
        """Return those that are given, by the names that OpenAI gave them."""
        given = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        return {name: value for name, value in given.items() if value is not None}


class Api(Protocol):
    """A kind of server.

    Attributes:
        name: As `--api` has it.
        media_type: What an answer's must be; None takes a stream of events, or JSON, as it comes.
        ends_by_closing: The stream's end is all that tells that an answer is complete.
    """

    name: str
    media_type: str | None
    ends_by_closing: bool

    def body(self, call: Call) -> Any:
        """Return what is sent as JSON.

        Raises:
            UnsuitableCallError: This API has no place for what the call holds.
        """
        ...

    def read_event(self, event: ServerSentEvent) -> Delta:
        """Make sense of an event.

        Raises:
            MalformedAnswerError: It makes none.
        """
        ...

    def read_whole(self, body: str) -> Delta:
        """Make sense of an answer that is no stream.

        Raises:
            MalformedAnswerError: It makes none.
        """
        ...


def messages_of(call: Call) -> list[Mapping[str, Any]]:
    """Return the conversation, or the question as the only message; an image joins the last."""
    messages = list(call.messages or ({"role": "user", "content": call.text},))
    if call.image_url is not None:
        image = {"type": "image_url", "image_url": {"url": call.image_url}}
        messages[-1] = {**messages[-1], "content": [{"type": "text", "text": call.text}, image]}
    return messages


def text_alone(call: Call, api_name: str) -> str:
    """Return the question for an API that takes a text and nothing else.

    Raises:
        UnsuitableCallError: There is an image or a conversation.
    """
    if call.image_url is not None:
        raise UnsuitableCallError(f"{api_name} takes no images; use openai-chat")
    if call.messages is not None and len(call.messages) > 1:
        raise UnsuitableCallError(f"{api_name} takes a text and no conversation; use openai-chat")
    return call.text


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        MalformedAnswerError: It is none.
    """
    try:
        value = from_json(text)
    except ValueError as error:
        raise MalformedAnswerError(f"not JSON ({error}): {shortened(text)}") from None
    if not isinstance(value, dict):
        raise MalformedAnswerError(f"JSON, but no object: {shortened(text)}")
    return value


def error_of(payload: Mapping[str, Any]) -> str | None:
    """Return what a payload's `error` says, however the server shapes it; None without one."""
    error = payload.get("error")
    if not error:
        return None
    if isinstance(error, dict):
        error = error.get("message") or error
    return shortened(str(error))


def said_by_error_event(data: str) -> str:
    """Return what an event named `error` says: its JSON's message, or else its text."""
    with suppress(MalformedAnswerError):
        if (said := error_of(json_object(data))) is not None:
            return said
    return shortened(data) or "an event named error, without a word"


def payload_of(event: ServerSentEvent) -> dict[str, Any] | Delta:
    """Return an event's JSON object, or at once what the event says: the end, or an error.

    Raises:
        MalformedAnswerError: It is neither.
    """
    if event.data == DONE:
        return Delta(is_done=True)
    if event.name == "error":
        return Delta(error=said_by_error_event(event.data))
    payload = json_object(event.data)
    if (error := error_of(payload)) is not None:
        return Delta(error=error)
    return payload


def usage_of(payload: Mapping[str, Any]) -> Usage | None:
    """Return OpenAI's `usage`, as far as it is there."""
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
    """Return a text in one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else f"{line[:max_chars]}{CUT_OFF}"
