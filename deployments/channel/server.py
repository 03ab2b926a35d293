"""The replica's end of the channels: a TCP server on the node's address.

Each ingress connects once and shows the secret, which one of Serve's calls has brought it. A
connection without it gets no byte of an answer, may send 256 bytes, lives a few seconds, and only
some of them can be open. All methods belong to one event loop.
"""

import asyncio
import hmac
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from secrets import token_bytes
from typing import Final, cast

from deployments.channel.calls import Calls, ConnectionCalls, Pool
from deployments.channel.countdown import Countdown
from deployments.channel.go_ahead import GoAheads
from deployments.channel.outbox import Outbox, OutgoingStream
from deployments.contract.channel.tls import TlsFiles
from deployments.contract.channel.wire import (
    MAX_INGRESS_BYTES,
    MAX_SILENCE_S,
    FrameReader,
    Hello,
    WireError,
    decode_go_ahead,
    decode_hello,
    encode_message,
    is_of_call,
    says_given_up,
)
from deployments.contract.generation import ChannelAddress, StreamKey
from deployments.contract.pooling_wire import GOODBYE, MAX_CALL_BYTES

logger = logging.getLogger("ray.serve.raystream.channel")

HEARTBEAT_S: Final = 1.0
"""How long a channel may be silent before the replica sends an empty message."""

LATE_S: Final = MAX_SILENCE_S - 2 * HEARTBEAT_S
"""The least time between two heartbeats after which an ingress may take the replica for lost."""

MAX_NUM_HELLO_TICKS: Final = 5
"""Those of a `Countdown` that a stranger may take to show the secret."""

TLS_TIMEOUT_S: Final = 20.0
"""How long a TLS handshake may take. asyncio counts seconds, also those in which it stood still."""

MAX_NUM_STRANGERS: Final = 64
"""The most connections that have not yet shown the secret. With TLS, asyncio's server shows us a
connection only after its handshake."""

MAX_NUM_CONNECT_TICKS: Final = 10
"""Those for which sequences run for an ingress that is not connected."""

MAX_BUFFER_BYTES: Final = 256 * 1024
"""Bytes that wait for an ingress to read, above which deltas gather in its outbox."""

CONFIRM_TIMEOUT_S: Final = 30.0
"""How long the system waits for an ingress's node to confirm what was sent to it."""

SECRET_BYTES: Final = 16
_HEARTBEAT: Final = encode_message(())


class ChannelServer:
    """Sends deltas and answers to all ingresses of a replica; hears their go-aheads and requests.

    Attributes:
        calls: The pooled requests that come through the channels; None if the replica takes none.
        go_aheads: What suspects wait for.
        was_given_up: Whether an ingress took the replica for lost while this process did not run.
    """

    def __init__(self, host: str, tls: TlsFiles | None = None) -> None:
        """Prepare the server; it listens from the first call of `address` on.

        Args:
            host: The address to listen on, which the ingresses can reach.
            tls: The files for TLS; None speaks plain TCP.
        """
        self.calls: Calls | None = None
        self.go_aheads = GoAheads()
        self.was_given_up = False
        self._host = host
        self._tls = tls
        self._secret = token_bytes(SECRET_BYTES)
        self._outboxes: dict[str, Outbox] = {}
        self._connections: dict[str, _Connection] = {}
        self._strangers: set[_Connection] = set()
        self._deadlines: dict[str, Countdown] = {}
        self._listening: asyncio.Future[tuple[asyncio.Server, ChannelAddress]] | None = None

    def take_calls(self, pool: Pool) -> None:
        """Let ingresses that connect from now on send pooled requests, which this answers."""
        self.calls = Calls(pool)

    async def address(self) -> ChannelAddress:
        """Return where ingresses connect.

        Raises:
            OSError: The host is no address of this machine.
        """
        if self._listening is None:
            self._listening = asyncio.ensure_future(self._listen())
        try:
            return (await asyncio.shield(self._listening))[1]
        except OSError:
            self._listening = None  # the next call tries again
            raise

    async def _listen(self) -> tuple[asyncio.Server, ChannelAddress]:
        server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self),
            self._host,
            0,
            ssl=None if self._tls is None else self._tls.server_context(),
            ssl_handshake_timeout=None if self._tls is None else TLS_TIMEOUT_S,
        )
        port = server.sockets[0].getsockname()[1]
        return server, ChannelAddress(self._host, port, self._secret, self._tls is not None)

    def close(self) -> None:
        """Stop listening and close all channels, after what is already on its way."""
        if self._listening is not None and self._listening.done():
            self._listening.result()[0].close()
        for connection in self._connections.values():
            connection.say_goodbye()
        for connection in [*self._connections.values(), *self._strangers]:
            connection.close()

    @property
    def num_strangers(self) -> int:
        """How many connections have not yet shown the secret."""
        return len(self._strangers)

    def greet(self, stranger: "_Connection") -> bool:
        """Add a connection; return whether there is room for it."""
        self._strangers.add(stranger)
        return len(self._strangers) <= MAX_NUM_STRANGERS

    @contextmanager
    def stream(self, key: StreamKey) -> Iterator[OutgoingStream]:
        """Open a stream to an ingress, which need not be connected yet.

        If the block ends before the last delta is on its way, the ingress hears that the stream was
        aborted.
        """
        outbox = self._outboxes.get(key.channel_id)
        if outbox is None:
            outbox = self._outboxes[key.channel_id] = Outbox()
            self._expect(key.channel_id, outbox)
        stream = outbox.open(key.number)
        try:
            yield stream
        finally:
            outbox.close(key.number)

    def flush(self) -> None:
        """Send each ingress what its streams have gained, in one message; see `Outbox.flush`."""
        for outbox in self._outboxes.values():
            outbox.flush()

    def knows(self, hello: Hello) -> bool:
        """Return whether a hello shows the secret; the time that takes tells nothing about it."""
        return hmac.compare_digest(hello.secret, self._secret)

    def connect(self, channel_id: str, connection: "_Connection") -> Outbox:
        """Give an ingress its outbox; an earlier connection of the same ingress is closed."""
        earlier = self._connections.pop(channel_id, None)
        if earlier is not None:
            self._outboxes[channel_id].disconnect()
            earlier.close()
        self._strangers.discard(connection)
        self._connections[channel_id] = connection
        deadline = self._deadlines.pop(channel_id, None)
        if deadline is not None:
            deadline.cancel()
        return self._outboxes.setdefault(channel_id, Outbox())

    def disconnect(self, channel_id: str | None, connection: "_Connection") -> None:
        """End the streams of an ingress whose connection is lost, unless it has another one."""
        self._strangers.discard(connection)
        if channel_id is None or self._connections.get(channel_id) is not connection:
            return
        del self._connections[channel_id]
        outbox = self._outboxes[channel_id]
        outbox.disconnect()
        self._expect(channel_id, outbox)

    def _expect(self, channel_id: str, outbox: Outbox) -> None:
        """Give an ingress time to connect; if it does not, end its streams and forget it."""

        def forget() -> None:
            del self._deadlines[channel_id], self._outboxes[channel_id]
            outbox.disconnect()

        self._deadlines[channel_id] = Countdown(MAX_NUM_CONNECT_TICKS, forget)


class _Connection(asyncio.Protocol):
    """One connection: a stranger until its hello shows the secret, then an ingress's channel."""

    def __init__(self, server: ChannelServer) -> None:
        self._server = server
        self._reader = FrameReader(MAX_INGRESS_BYTES)
        self._channel_id: str | None = None
        self._outbox: Outbox | None = None
        self._calls: ConnectionCalls | None = None
        self._has_sent = False
        self._timer: asyncio.TimerHandle | Countdown | None = None
        self._beat_s = 0.0
        self._was_late = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(MAX_BUFFER_BYTES)
        _limit_silence(transport.get_extra_info("socket"))
        if not self._server.greet(self):
            self._transport.abort()
            return
        self._timer = Countdown(MAX_NUM_HELLO_TICKS, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        try:
            for payload in self._reader.feed(data):
                self._hear(payload)
        except WireError as error:
            logger.warning("closed a channel: %s", error)
            self._transport.abort()

    def _hear(self, payload: bytes) -> None:
        """Take the hello, and after that all else that an ingress says.

        Raises:
            WireError: The first frame is no hello or lacks the secret, or a later one is malformed.
        """
        if self._outbox is not None:
            if self._calls is not None and is_of_call(payload):
                self._calls.hear(payload)
            elif says_given_up(payload):
                # A replica that was only cut off by the network is sound.
                self._server.was_given_up |= self._was_late or self._is_late()
            else:
                self._server.go_aheads.give(decode_go_ahead(payload))
            return
        hello = decode_hello(payload)
        if not self._server.knows(hello):
            raise WireError("an ingress must show this replica's secret")
        self._channel_id = hello.channel_id
        self._outbox = self._server.connect(hello.channel_id, self)
        if self._server.calls is not None:
            self._calls = ConnectionCalls(self._server.calls, self._send)
            self._reader.max_bytes = MAX_CALL_BYTES
        self._send(_HEARTBEAT)
        self._outbox.connect(self._send)
        self._beat_s = asyncio.get_running_loop().time()
        self._set_timer()

    def _send(self, frame: bytes) -> None:
        self._has_sent = True
        self._transport.write(frame)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self.beat)

    def beat(self) -> None:
        """Send a heartbeat if nothing was sent since the last call."""
        self._was_late, self._beat_s = self._is_late(), asyncio.get_running_loop().time()
        # While it is paused, the ingress has enough to read.
        if not self._has_sent and self._outbox is not None and not self._outbox.is_paused:
            self._transport.write(_HEARTBEAT)
        self._has_sent = False
        self._set_timer()

    def _is_late(self) -> bool:
        return asyncio.get_running_loop().time() - self._beat_s > LATE_S

    def pause_writing(self) -> None:
        if self._outbox is not None:
            self._outbox.is_paused = True

    def resume_writing(self) -> None:
        if self._outbox is not None:
            self._outbox.is_paused = False
            self._outbox.send()

    def say_goodbye(self) -> None:
        """Tell the ingress that calls without an answer won't be finished, as the replica stops."""
        if self._calls is not None:
            self._calls.flush()
            self._end_calls()
            self._send(GOODBYE)

    def _end_calls(self) -> None:
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.close()

    def close(self) -> None:
        """Close the connection after what is already written."""
        self._outbox = None
        self._end_calls()
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._end_calls()
        self._server.disconnect(self._channel_id, self)


def _limit_silence(connection: socket.socket) -> None:
    """Let the system close a connection whose other end is gone without a word."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        timeout_ms = round(CONFIRM_TIMEOUT_S * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
