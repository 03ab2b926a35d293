"""What the WebSockets of an ingress keep of their last responses, for `previous_response_id`.

A connection keeps one conversation for each of its streams: the input and output of the stream's
last response, as JSON. All of them together have a bound; beyond it, the conversation that was used
longest ago is forgotten, and its client is told to send it whole.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

MAX_KEPT_BYTES: Final = 256 * 2**20
"""The most that all connections of an ingress keep together."""

MAX_STREAMS: Final = 16
"""Streams of a connection whose conversations are kept: those that have ended last."""

Items = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation up to a response.

    Attributes:
        response_id: The response's id.
        items: All items of the conversation, the response's own last: a list as JSON.
    """

    response_id: str
    items: bytes


class Histories:
    """The last conversation of each stream of each connection."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        """Start without any.

        Args:
            max_bytes: The most that all conversations take together.
        """
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[object, str | None], Conversation] = OrderedDict()
        self._streams: dict[object, dict[str | None, None]] = {}  # in the order of their ends
        self._num_bytes = 0

    def keep(
        self,
        connection: object,
        stream_id: str | None,
        response_id: str,
        items: Sequence[dict[str, Any]],
    ) -> None:
        """Keep a stream's conversation in place of its last one."""
        self.forget(connection, stream_id)
        encoded = json.dumps(list(items), separators=(",", ":")).encode()
        self._kept[connection, stream_id] = Conversation(response_id, encoded)
        self._num_bytes += len(encoded)
        streams = self._streams.setdefault(connection, {})
        streams[stream_id] = None
        if len(streams) > MAX_STREAMS:
            self.forget(connection, next(iter(streams)))
        while self._num_bytes > self._max_bytes:
            self.forget(*next(iter(self._kept)))

    def find(self, connection: object, response_id: str) -> Items | None:
        """Return the items of a conversation of any stream; None if the connection lacks it."""
        for stream_id in self._streams.get(connection, ()):
            kept = self._kept[connection, stream_id]
            if kept.response_id == response_id:
                self._kept.move_to_end((connection, stream_id))
                items: Items = json.loads(kept.items)
                return items
        return None

    def forget(self, connection: object, stream_id: str | None) -> None:
        """Forget a stream's conversation, if it has one."""
        kept = self._kept.pop((connection, stream_id), None)
        if kept is None:
            return
        self._num_bytes -= len(kept.items)
        streams = self._streams[connection]
        del streams[stream_id]
        if not streams:
            del self._streams[connection]

    def leave(self, connection: object) -> None:
        """Forget all conversations of a connection."""
        for stream_id in list(self._streams.get(connection, ())):
            self.forget(connection, stream_id)
