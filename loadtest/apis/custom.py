"""Any other server: a body by a template, and a path to the text in what it answers.

The template is JSON. In each of its strings `{text}`, `{user}`, `{index}` and `{image_url}` are
filled in; other braces stay as they are. A string that is nothing but `{messages}` becomes the list
of messages.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import jmespath
from jmespath.exceptions import JMESPathError
from jmespath.parser import ParsedResult
from pydantic_core import from_json

from loadtest.apis.contract import (
    Call,
    Delta,
    MalformedAnswerError,
    error_of,
    messages_of,
    said_by_error_event,
    shortened,
)
from loadtest.sse import ServerSentEvent

_PLACEHOLDER: Final = re.compile(r"\{(text|user|index|image_url)\}")


class Custom:
    """A body by a template; the text by a path, or the event's data as it stands."""

    name = "custom"
    media_type: str | None = None

    def __init__(self, template: Mapping[str, Any], text_path: str | None, done: str) -> None:
        """Read the path once.

        Args:
            template: What is sent.
            text_path: JMESPath to the text in an event's JSON; None means that the data is text.
            done: The data of the last event; "" where only the stream's end tells.

        Raises:
            ValueError: The path is none.
        """
        self._template = dict(template)
        self._done = done
        self.ends_by_closing = not done
        self._text_path = None if text_path is None else _compiled(text_path)

    def body(self, call: Call) -> Any:
        """Return the template with its placeholders filled in."""
        return _filled(self._template, call)

    def read_event(self, event: ServerSentEvent) -> Delta:
        """Read the text, the end, or an error."""
        if self._done and event.data == self._done:
            return Delta(is_done=True)
        if event.name == "error":
            return Delta(error=said_by_error_event(event.data))
        return self._delta(event.data)

    def read_whole(self, body: str) -> Delta:
        """Read an answer that comes in one piece, and is complete by that."""
        return self._delta(body)._replace(is_done=True)

    def _delta(self, data: str) -> Delta:
        if self._text_path is None:
            return Delta(text=data)
        try:
            payload = from_json(data)
        except ValueError as error:
            raise MalformedAnswerError(f"not JSON ({error}): {shortened(data)}") from None
        if isinstance(payload, dict) and (said := error_of(payload)) is not None:
            return Delta(error=said)
        return Delta(text=_found(self._text_path, payload))


def _found(text_path: ParsedResult, payload: Any) -> str:
    try:
        text = text_path.search(payload)
    except JMESPathError as error:
        raise MalformedAnswerError(f"--text-path fails on it: {error}") from None
    return text if isinstance(text, str) else "" if text is None else str(text)


def _compiled(text_path: str) -> ParsedResult:
    try:
        return jmespath.compile(text_path)
    except JMESPathError as error:
        raise ValueError(f"--text-path {text_path!r} is no JMESPath: {error}") from None


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
