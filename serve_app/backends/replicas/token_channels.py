"""The ingress's end of the channels: one connection to each replica, for all its requests.

A replica says where it listens in one of Serve's calls; the first request connects, and the others
share the connection. Streams get their deltas through it, and pooled requests travel through it
both ways. A channel that is lost, or silent for too long, fails all its streams and calls at once:
that is how the ingress learns that a replica is dead.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from contextvars import Context
from itertools import count
from secrets import token_hex
from typing import Any, Final, TypeVar, cast

from deployments.contract.channel.tls import TlsFiles
from deployments.contract.channel.wire import (
    GIVEN_UP,
    MAX_MESSAGE_BYTES,
    MAX_SILENCE_S,
    FrameReader,
    Hello,
    WireError,
    decode_message,
    encode_go_ahead,
    encode_hello,
    is_of_call,
)
from deployments.contract.errors import ReplicaUnavailableError
from deployments.contract.generation import ChannelAddress, StreamKey
from deployments.contract.pooling import PoolingRequest
from deployments.contract.pooling_wire import (
    CallAnswer,
    decode_answer,
    encode_call,
    encode_departure,
)
from serve_app.backends.replicas.replica_errors import ReplicaStoppedError
from serve_app.backends.replicas.stream_box import Rounds, StreamBox

T = TypeVar("T")

TICK_S: Final = 1.0
MAX_NUM_SILENT_TICKS: Final = round(MAX_SILENCE_S / TICK_S)
"""Ticks are counted, not seconds: if this process has slept, only one tick is late, and what has
arrived meanwhile is read before the next."""

MAX_NUM_OPENING_TICKS: Final = 5
"""Those that a channel may take to open."""

CALL_END_TIMEOUT_S: Final = 1.0
"""How long a call may outlive its replica's channel. It tells better how the replica has ended."""


OTHERS_S: Final = 1.0
"""How long it counts what an answer has told of other ingresses' calls. A replica that is passed
over because of them answers nothing newer."""


class TokenChannels:
    """The channels to all replicas of a model, and the boxes of the streams that use them.

    Attributes:
        channel_id: Names this ingress to the replicas; see `StreamKey`.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start without a connection.

        Args:
            environment: Where Ray's variables name the files for TLS.
        """
        self.channel_id = token_hex(16)
        self._environment = environment
        self._numbers = count()
        self._rounds = Rounds()
        self._boxes: dict[int, StreamBox] = {}
        self._channels: dict[ChannelAddress, asyncio.Task[Channel]] = {}

    def open(self) -> StreamBox:
        """Return the box of a new stream; deltas may arrive as soon as a replica has its key."""
        number = next(self._numbers)
        box = self._boxes[number] = StreamBox(StreamKey(self.channel_id, number), self._rounds)
        return box

    def close(self, box: StreamBox) -> None:
        """Drop a box; what still arrives for it is ignored. Closing twice is harmless."""
        self._boxes.pop(box.key.number, None)

    async def connect(self, box: StreamBox, address: ChannelAddress) -> None:
        """Connect a stream to the replica that has accepted it, unless it is connected already.

        Raises:
            ReplicaUnavailableError: The replica can't be reached there.
        """
        channel = await self._reach(address)
        box.source = box.source or channel
        channel.require_open()

    async def reach(self, address: ChannelAddress) -> "Channel":
        """Return the channel to a replica, for a suspect that is about to begin there.

        Raises:
            ReplicaUnavailableError: The replica can't be reached there.
        """
        channel = await self._reach(address)
        channel.require_open()
        return channel

    async def _reach(self, address: ChannelAddress) -> "Channel":
        if address not in self._channels:
            # An empty context: the channel outlives the request that opens it.
            opening = asyncio.get_running_loop().create_task(
                self._connect(address), context=Context()
            )
            self._channels[address] = opening
            opening.add_done_callback(lambda _: self._drop_lost(address))
        return await asyncio.shield(self._channels[address])

    async def _connect(self, address: ChannelAddress) -> "Channel":
        channel = Channel(address, self)
        opening = asyncio.ensure_future(self._open(channel))
        try:
            for _ in range(MAX_NUM_OPENING_TICKS):
                await asyncio.wait([opening], timeout=TICK_S)
                if opening.done():
                    opening.result()
                    return channel
            raise TimeoutError
        except BaseException as error:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            channel.abort()
            if isinstance(error, OSError):  # also a TimeoutError
                raise ReplicaUnavailableError("The model's replica can't be reached.") from error
            raise

    async def _open(self, channel: "Channel") -> None:
        address = channel.address
        tls = TlsFiles.of(self._environment) if address.uses_tls else None
        await asyncio.get_running_loop().create_connection(
            lambda: channel,
            address.host,
            address.port,
            ssl=None if tls is None else tls.client_context(),
        )
        await channel.opened

    def _drop_lost(self, address: ChannelAddress) -> None:
        """Drop the channel to a replica if it has failed or is lost, but none that opens again."""
        opening = self._channels.get(address)
        if opening is None or not opening.done():
            return
        if opening.cancelled() or opening.exception() is not None or opening.result().is_lost:
            del self._channels[address]

    def box(self, number: int) -> StreamBox | None:
        """Return the box of an open stream."""
        return self._boxes.get(number)

    def lose(self, channel: "Channel") -> None:
        """Fail all streams of a channel; the next stream connects again."""
        self._drop_lost(channel.address)
        for box in list(self._boxes.values()):
            if box.source is channel:
                box.fail(_lost())

    async def aclose(self) -> None:
        """Close all connections and wait until they are closed."""
        openings = list(self._channels.values())
        for opening in openings:
            opening.cancel()
        ended = await asyncio.gather(*openings, return_exceptions=True)
        for channel in [each for each in ended if isinstance(each, Channel)]:
            channel.abort()
            await channel.closed


class Channel(asyncio.Protocol):
    """The connection to one replica.

    Attributes:
        opened: Done when the replica has taken the hello.
        closed: Done when the connection is lost, or closed.
        is_stopping: Whether the replica has said that it stops, and takes no more calls.
        num_other_calls: Calls that other ingresses had open at the replica, when it last answered.
    """

    def __init__(self, address: ChannelAddress, channels: TokenChannels) -> None:
        loop = asyncio.get_running_loop()
        self.address = address
        self.opened: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._channels = channels
        self._reader = FrameReader(MAX_MESSAGE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_silent_ticks = 0
        self.is_stopping = False
        self.num_other_calls = 0
        self._answered_s = 0.0  # the last time, by the event loop's clock
        self._call_numbers = count()
        self._calls: dict[int, asyncio.Future[CallAnswer]] = {}
        self._gathered: list[bytes] = []

    @property
    def is_lost(self) -> bool:
        """Whether nothing more can arrive."""
        return self.closed.done() or (self._transport is not None and self._transport.is_closing())

    def require_open(self) -> None:
        """Raise if nothing more can arrive.

        Raises:
            ReplicaUnavailableError: The channel is lost.
        """
        if self.is_lost:
            raise _lost()

    def give_go_ahead(self, number: int) -> None:
        """Let a suspect begin at the replica.

        Args:
            number: The one in `Started`.
        """
        assert self._transport is not None, "it has been opened"
        self._transport.write(encode_go_ahead(number))

    @property
    def takes_calls(self) -> bool:
        """Whether a pooled request may be sent now."""
        return self.opened.done() and not self.is_stopping and not self.is_lost

    @property
    def load(self) -> int:
        """Calls that are open at the replica, as far as this ingress knows."""
        is_known = asyncio.get_running_loop().time() < self._answered_s + OTHERS_S
        return len(self._calls) + (self.num_other_calls if is_known else 0)

    async def call(self, request: PoolingRequest) -> CallAnswer | None:
        """Send a pooled request and return the replica's answer; None if it is too large.

        Raises:
            ReplicaStoppedError: The replica has stopped without an answer.
            ReplicaUnavailableError: The channel is lost.
        """
        number = next(self._call_numbers)
        frame = encode_call(number, request)
        if frame is None:
            return None
        answer: asyncio.Future[CallAnswer] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self._gather(frame)
        try:
            return await answer
        finally:
            if self._calls.pop(number, None) is not None and not self.is_lost:
                self._gather(encode_departure(number))

    def _gather(self, frame: bytes) -> None:
        """Send a frame with all others of this turn of the event loop."""
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._send_gathered)
        self._gathered.append(frame)

    def _send_gathered(self) -> None:
        frames, self._gathered = self._gathered, []
        if not self.is_lost:
            assert self._transport is not None, "it has been opened"
            self._transport.write(b"".join(frames))

    def _hear_answer(self, payload: bytes) -> None:
        answered = decode_answer(payload)
        if answered is None:
            self.is_stopping = True
            self._fail_calls(ReplicaStoppedError("The model's replica has stopped."))
            return
        number, answer = answered
        call = self._calls.pop(number, None)
        self.num_other_calls = max(0, answer.num_calls - len(self._calls))
        self._answered_s = asyncio.get_running_loop().time()
        if call is not None and not call.done():
            call.set_result(answer)

    def _fail_calls(self, error: ReplicaUnavailableError) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(error)

    async def unless_lost(self, call: Awaitable[T]) -> T:
        """Wait for a call to the replica, but not for long once the channel is lost.

        Raises:
            ReplicaUnavailableError: The channel is lost, and the call goes on.
        """
        calling = asyncio.ensure_future(call)
        try:
            either: list[asyncio.Future[Any]] = [calling, self.closed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                await asyncio.wait([calling], timeout=CALL_END_TIMEOUT_S)
            if not calling.done():
                raise _lost()
            return calling.result()
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)

    def abort(self) -> None:
        """Close the connection, if there is one, at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Show the replica its secret."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(encode_hello(Hello(self.address.secret, self._channels.channel_id)))
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        """Pass on what the replica says; it has broken the protocol if that is malformed."""
        self._num_silent_ticks = 0
        try:
            for payload in self._reader.feed(data):
                self._hear(payload)
        except WireError:
            self.abort()

    def _hear(self, payload: bytes) -> None:
        if not self.opened.done():
            self.opened.set_result(None)
        if is_of_call(payload):
            self._hear_answer(payload)
            return
        for number, delta in decode_message(payload):
            box = self._channels.box(number)
            if box is not None:
                box.source = self
                box.put(delta)

    def tick(self) -> None:
        """Close the connection if the replica was silent for too many ticks, and tell it why."""
        self._num_silent_ticks += 1
        if self._num_silent_ticks > MAX_NUM_SILENT_TICKS:
            assert self._transport is not None, "it has been opened"
            self._transport.write(GIVEN_UP)
            self.abort()
        else:
            self._set_timer()

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self.tick)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all streams and calls of the channel."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.opened.done():
            self.opened.set_exception(ConnectionResetError("the replica refused the channel"))
            self.opened.exception()  # else Python logs "never retrieved" if TLS has failed before
        self.closed.set_result(None)
        self._fail_calls(_lost())
        self._channels.lose(self)


def _lost() -> ReplicaUnavailableError:
    return ReplicaUnavailableError("The model's replica is lost.")
