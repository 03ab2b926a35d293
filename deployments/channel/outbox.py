"""What a replica has for one ingress: the deltas of all its streams that are not yet sent.

One message holds what all streams have gained. A stream's first delta and its last leave at once,
with all that is there. Otherwise a message leaves at most every `MIN_INTERVAL_S`: the steps of a
small model follow each other faster than a reader can take them in. While the ingress is not
connected, or reads too slowly, deltas gather, and each stream gets one joined delta later. So the
outbox holds at most the answers themselves, however slow the ingress is.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from deployments.contract.channel.wire import MIN_INTERVAL_S, Entry, encode_message
from deployments.contract.output import FinishReason, TextDelta

MAX_WEIGHT: Final = 1024
"""The most deltas in one message. After each message the outbox looks again whether the ingress
keeps up; a step of the engine seldom has more."""

ENTRIES_PER_WEIGHT: Final = 256
"""Log-probabilities of a prompt that count as one more delta: 3 KiB and the bytes of the tokens."""

ABORTED: Final = TextDelta((), "", FinishReason.ABORT)


class OutgoingStream:
    """One sequence's way to its ingress."""

    def __init__(self, outbox: "Outbox", number: int) -> None:
        self._outbox = outbox
        self._number = number
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._has_begun = False
        self.is_delivered = False

    def put(self, delta: TextDelta) -> None:
        """Add a delta to the next message; none may follow the last one."""
        is_urgent = not self._has_begun or delta.finish_reason is not None
        self._has_begun = True
        self._outbox.put(self._number, delta, is_urgent=is_urgent)

    async def wait_until_ended(self) -> None:
        """Wait until the last delta is on its way, or the ingress is lost."""
        await self._ended

    def end(self, *, is_delivered: bool) -> None:
        """Wake the waiting sequence: the last delta was sent, or nothing can be sent any more."""
        self.is_delivered = self.is_delivered or is_delivered
        if not self._ended.done():
            self._ended.set_result(None)


class Outbox:
    """The streams to one ingress."""

    def __init__(self) -> None:
        self._streams: dict[int, OutgoingStream] = {}
        self._gathered: dict[int, list[TextDelta]] = {}
        self._send: Callable[[bytes], None] | None = None
        self._is_urgent = False
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.is_paused = False

    def open(self, number: int) -> OutgoingStream:
        """Add a stream; its ingress never uses a number twice."""
        assert number not in self._streams, f"stream {number} is open already"
        stream = self._streams[number] = OutgoingStream(self, number)
        return stream

    def close(self, number: int) -> None:
        """Remove a stream; unless its last delta was sent, the ingress hears of an abort."""
        if not self._streams.pop(number).is_delivered:
            self._gathered[number] = [ABORTED]
            self.send()

    def put(self, number: int, delta: TextDelta, *, is_urgent: bool) -> None:
        """Add what a stream has gained."""
        self._gathered.setdefault(number, []).append(delta)
        self._is_urgent = self._is_urgent or is_urgent

    def flush(self) -> None:
        """Send what is there if it is urgent or due; otherwise when it is due."""
        loop = asyncio.get_running_loop()
        if self._is_urgent or loop.time() >= self._due_s:
            self.send()
        elif self._gathered and self._timer is None:
            self._timer = loop.call_at(self._due_s, self.send)

    def send(self) -> None:
        """Send all that is there, as far as the ingress keeps up."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._gathered:
            self._due_s = asyncio.get_running_loop().time() + MIN_INTERVAL_S
        self._is_urgent = False
        while self._gathered and self._send is not None and not self.is_paused:
            self._send(encode_message(self._take()))

    def connect(self, send: Callable[[bytes], None]) -> None:
        """Send to this connection from now on, first what has gathered."""
        self._send = send
        self.is_paused = False
        self.send()

    def disconnect(self) -> None:
        """End all streams: what was sent last may be lost, so none can go on.

        If the ingress connects again, it hears that they were aborted.
        """
        self._send = None
        self._gathered = {number: [ABORTED] for number in self._streams}
        for stream in self._streams.values():
            stream.end(is_delivered=False)

    def _take(self) -> list[Entry]:
        """Remove the deltas of the next message; return one entry for each stream."""
        entries: list[Entry] = []
        room = MAX_WEIGHT
        for number in list(self._gathered):
            deltas = self._gathered.pop(number)
            num_fitting, room = _fit(deltas, room)
            if len(deltas) > num_fitting:
                self._gathered[number] = deltas[num_fitting:]
                deltas = deltas[:num_fitting]
            entries.append((number, TextDelta.join(deltas)))
            stream = self._streams.get(number)
            if stream is not None and deltas[-1].finish_reason is not None:
                stream.end(is_delivered=True)
            if room <= 0:
                break
        return entries


def _fit(deltas: Sequence[TextDelta], room: int) -> tuple[int, int]:
    """Return how many deltas fit into a message, at least one, and the room that they leave."""
    if not any(delta.prompt_logprobs for delta in deltas):
        num_fitting = min(len(deltas), room)
        return num_fitting, room - num_fitting
    for at, delta in enumerate(deltas):
        if room <= 0:
            return at, room
        num_entries = sum(part.num_entries for part in delta.prompt_logprobs)
        room -= 1 + num_entries // ENTRIES_PER_WEIGHT
    return len(deltas), room
