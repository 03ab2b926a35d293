"""What the WebSockets of an ingress keep of their last responses, for `previous_response_id`.

Each connection keeps one conversation: the input and output of its last response, as JSON. All of
them together have a bound; beyond it, the conversation that was used longest ago is forgotten, and
its client is told to send it whole.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

MAX_KEPT_BYTES: Final = 256 * 2**20
"""The most that all connections of an ingress keep together."""

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
    """The last conversation of each connection."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        """Start without any.

        Args:
            max_bytes: The most that all conversations take together.
        """
        self._max_bytes = max_bytes
        self._kept: OrderedDict[object, Conversation] = OrderedDict()
        self._num_bytes = 0

    def keep(self, connection: object, response_id: str, items: Sequence[dict[str, Any]]) -> None:
        """Keep a connection's conversation in place of its last one."""
        self.forget(connection)
        encoded = json.dumps(list(items), separators=(",", ":")).encode()
        self._kept[connection] = Conversation(response_id, encoded)
        self._num_bytes += len(encoded)
        while self._num_bytes > self._max_bytes:
            self.forget(next(iter(self._kept)))

    def find(self, connection: object, response_id: str) -> Items | None:
        """Return a conversation's items; None if the connection does not keep it."""
        kept = self._kept.get(connection)
        if kept is None or kept.response_id != response_id:
            return None
        self._kept.move_to_end(connection)
        items: Items = json.loads(kept.items)
        return items

    def forget(self, connection: object) -> None:
        """Forget a connection's conversation, if it has one."""
        kept = self._kept.pop(connection, None)
        if kept is not None:
            self._num_bytes -= len(kept.items)
