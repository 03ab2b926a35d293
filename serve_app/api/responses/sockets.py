"""The WebSockets of an ingress: which handshakes are accepted, and when connections end.

A connection holds one of the ingress's places for requests as long as it is open, so their number
is bounded by `limits.max_sockets`, and their age by `limits.max_socket_s`. A handshake that is not
accepted is answered with a status. 426 is the one after which Codex asks by HTTP at once.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from starlette.datastructures import Headers

from deployments.contract.errors import ReplicaUnavailableError, UpgradeRequiredError
from serve_app.api.responses.history import Histories
from serve_app.config import LimitsConfig
from serve_app.http.origin import require_origin

logger = logging.getLogger("ray.serve")

POLL_S: Final = 1.0
"""How often an ingress with open connections asks whether Serve stops it."""


HANDSHAKE: Final = "require_room"
"""Set, to `Sockets.require_room`, in the state of a GET that is the handshake of a WebSocket."""

RequireRoom = Callable[[Headers], None]

IsStopping = Callable[[], Awaitable[bool]]
"""Asks Serve whether it stops this ingress; may raise anything."""


class Sockets:
    """The open connections.

    Attributes:
        histories: What they keep of their last responses.
        stores_responses: Whether `previous_response_id` may name one that is stored.
        max_age_s: How long each may last, in seconds; an answer that runs then is finished.
        is_draining: Whether the ingress is about to end.
    """

    def __init__(
        self, limits: LimitsConfig, origins: Sequence[str] = (), *, stores_responses: bool = False
    ) -> None:
        """Start without a connection.

        Args:
            limits: The bounds of connections.
            origins: Origins of web pages that may connect besides the server's own.
            stores_responses: Whether the server stores responses.
        """
        self.histories = Histories()
        self.stores_responses = stores_responses
        self.max_age_s = limits.max_socket_s
        self.is_draining = False
        self._max_sockets = limits.max_sockets
        self._origins = frozenset(origins)
        self._num_places = 0
        self._has_any = asyncio.Event()
        self._on_drain: dict[object, Callable[[], object]] = {}

    @contextmanager
    def place(self) -> Iterator[None]:
        """Count a handshake, and then its connection, while the block runs."""
        self._num_places += 1
        try:
            yield
        finally:
            self._num_places -= 1

    def require_room(self, headers: Headers) -> None:
        """Return if a handshake that has its place may be accepted.

        Raises:
            ForeignOriginError: A web page of another origin asks.
            UpgradeRequiredError: Too many connections are open.
            ReplicaUnavailableError: The ingress is about to end.
        """
        require_origin(headers, self._origins)
        if self._num_places > self._max_sockets:
            raise UpgradeRequiredError(
                f"The server holds as many WebSockets as it may, {self._max_sockets} "
                "(limits.max_sockets). Send POST /v1/responses instead."
            )
        if self.is_draining:
            raise ReplicaUnavailableError("The server is about to stop. Connect again in a moment.")

    @contextmanager
    def watched(self, on_drain: Callable[[], object]) -> Iterator[None]:
        """Call a function if the ingress is about to end while the block runs."""
        key = object()
        self._on_drain[key] = on_drain
        self._has_any.set()
        try:
            yield
        finally:
            del self._on_drain[key]
            if not self._on_drain:
                self._has_any.clear()

    def drain(self) -> None:
        """End all connections, each when its answer has ended; Serve waits for them."""
        self.is_draining = True
        for on_drain in list(self._on_drain.values()):
            on_drain()

    async def watch(self, is_stopping: IsStopping, poll_s: float = POLL_S) -> None:
        """Drain once Serve stops the ingress; Serve is asked only while a connection is open."""
        while True:
            await self._has_any.wait()
            try:
                if await is_stopping():
                    break
            except Exception as error:  # noqa: BLE001 - any of Ray's; the next turn asks again
                logger.warning("Serve did not tell whether it stops this ingress: %s", error)
            await asyncio.sleep(poll_s)
        self.drain()
