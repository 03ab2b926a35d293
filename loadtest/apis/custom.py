"""Any other server: a template for the body, and a path to the text in the answer.

The template is JSON. In its strings, `{text}`, `{user}`, `{index}` and `{image_url}` are replaced;
other braces stay. A string that is exactly `{messages}` becomes the list of messages.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import from_json

from loadtest.client.contract import (
    PING,
    Call,
    Delta,
    MalformedAnswerError,
    error_event_message,
    error_of,
    messages_of,
    oddity_of,
    shortened,
)
from loadtest.client.sse import ServerSentEvent

if TYPE_CHECKING:
    from loadtest.apis.text_path import TextPath

_PLACEHOLDER: Final = re.compile(r"\{(text|user|index|image_url)\}")


class Custom:
    """A server with a configured body template and text path."""

    name = "custom"
    media_type: str | None = None

    def __init__(self, template: Mapping[str, Any], text_path: str | None, done: str) -> None:
        """Compile the path.

        Args:
            template: The request body, with placeholders.
            text_path: JMESPath of the text in an event's JSON; None means that the data is the
                text.
            done: The data of the last event; "" if the end of the stream is the end.

        Raises:
            ValueError: `text_path` is not a JMESPath.
        """
        self._template = dict(template)
        self._done = done
        self.ends_by_closing = not done
        self._text_path = None if text_path is None else _compiled(text_path)

    def body(self, call: Call) -> Any:
        """Return the template with its placeholders filled in."""
        return _filled(self._template, call)

    def read_event(self, event: ServerSentEvent) -> Delta:
        """Parse a text, the end, or an error."""
        if self._done and event.data == self._done:
            return Delta(is_done=True)
        if event.name == "error":
            return Delta(error=error_event_message(event.data))
        # Without a path the data is the text, which may be empty or begin with a colon.
        is_text = self._text_path is None and event.name != PING
        if not is_text and (oddity := oddity_of(event)) is not None:
            return Delta(oddity=oddity)
        return self._delta(event.data)

    def read_whole(self, body: str) -> Delta:
        """Parse an answer in one piece, which is complete."""
        return self._delta(body)._replace(is_done=True)

    def _delta(self, data: str) -> Delta:
        if self._text_path is None:
            return Delta(text=data)
        try:
            payload = from_json(data)
        except ValueError as error:
            raise MalformedAnswerError(f"not JSON ({error}): {shortened(data)}") from None
        if isinstance(payload, dict) and (message := error_of(payload)) is not None:
            return Delta(error=message)
        return Delta(text=self._text_path.text_in(payload))


def _compiled(text_path: str) -> "TextPath":
    # jmespath is of the extra `bench`: all other APIs run without it.
    from loadtest.apis.text_path import TextPath

    return TextPath(text_path)


def _filled(value: Any, call: Call) -> Any:
    if isinstance(value, dict):
        return {key: _filled(each, call) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, call) for each in value]
    if value == "{messages}":
        return messages_of(call)
    return _filled_text(value, call) if isinstance(value, str) else value


def _filled_text(text: str, call: Call) -> str:
    known = {
        "text": call.text,
        "user": call.user,
        "index": str(call.index),
        "image_url": call.image_url or "",
    }
    return _PLACEHOLDER.sub(lambda match: known[match[1]], text)
