"""Reads whole answers of our server, by our client's reader."""

import json
import re
from collections.abc import Mapping
from typing import Any

from serve_app.client.event_reader import Comment, Event, EventReader
from tests.serve_app.apps import AppClient

ID = re.compile(r"^id: (.*)\n(?:.+\n)*\n", re.MULTILINE)


class SseDecoder:
    """Takes bytes in chunks of any size and returns the data of complete events."""

    def __init__(self) -> None:
        self.comments: list[str] = []  # all comments so far
        self.ids: list[str] = []  # the ids of the events that a chunk holds whole, in order
        self._reader = EventReader()

    def feed(self, piece: bytes) -> list[str]:
        found = self._reader.feed(piece)
        self.comments += [each.text for each in found if isinstance(each, Comment)]
        self.ids += ID.findall(piece.decode("utf-8", "replace"))
        return [each.data for each in found if isinstance(each, Event)]

    @property
    def last_event_id(self) -> str:
        return self.ids[-1] if self.ids else ""


def events_of(body: bytes) -> list[Any]:
    """Return the events of a body, decoded from JSON except for `[DONE]`."""
    data = SseDecoder().feed(body)
    return [event if event == "[DONE]" else json.loads(event) for event in data]


async def stream_events(client: AppClient, path: str, body: Mapping[str, object]) -> list[Any]:
    """Ask for a stream; return its events as `events_of` does."""
    answer = await client.ask(path, {**body, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(answer.content)
