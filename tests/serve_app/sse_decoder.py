"""A reader of Server-Sent Events, written from the standard to check our writer.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

import codecs
import json
from collections.abc import Mapping
from typing import Any

import httpx


class SseDecoder:
    """Takes bytes in chunks of any size and returns the data of complete events.

    Attributes:
        comments: All comments so far.
        last_event_id: The id of the last complete event that had one.
        ids: The ids of complete events, in order.
    """

    def __init__(self) -> None:
        self.last_event_id = ""
        self.ids: list[str] = []
        self._id: str | None = None
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._line = ""
        self._after_cr = False
        self._data: list[str] = []
        self.comments: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        events: list[str] = []
        for character in self._utf8.decode(piece):
            if character == "\n" and self._after_cr:
                self._after_cr = False
                continue
            self._after_cr = character == "\r"
            if character in "\r\n":
                events += self._end_line()
            else:
                self._line += character
        return events

    def _end_line(self) -> list[str]:
        line, self._line = self._line, ""
        if not line:
            data, self._data = self._data, []
            if self._id is not None:
                self.last_event_id, self._id = self._id, None
                self.ids.append(self.last_event_id)
            return ["\n".join(data)] if data else []
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not name:
            self.comments.append(value)
        elif name == "data":
            self._data.append(value)
        elif name == "id" and "\0" not in value:
            self._id = value
        return []


def events_of(body: bytes) -> list[Any]:
    """Return the events of a body, decoded from JSON except for `[DONE]`."""
    data = SseDecoder().feed(body)
    return [event if event == "[DONE]" else json.loads(event) for event in data]


async def stream_events(
    client: httpx.AsyncClient, path: str, body: Mapping[str, object]
) -> list[Any]:
    """Ask for a stream; return its events as `events_of` does."""
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(answer.content)
