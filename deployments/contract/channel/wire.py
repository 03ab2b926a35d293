"""What goes over a channel's socket: frames, each a length and a msgpack value.

The ingress's first frame is its hello. The replica answers with an empty message; after that, its
frames are messages with what streams have gained, arrays of entries. An empty one is a heartbeat.
The ingress sends go-aheads, by which suspects begin, and says so before it closes the channel of a
replica that it takes for lost. Frames that are maps carry pooled requests
and their answers (`deployments.contract.pooling_wire`). Nothing is pickled, so a stranger
who reaches the socket can at worst send a malformed frame.

    frame    = length of the payload (4 bytes, big-endian), payload
    hello    = [version, secret, channel id]
    go-ahead = [number in `Started`]
    given up = []
    entry    = [stream number, token ids, text]
             | [stream number, token ids, text, finish reason, error, logprobs, cached tokens,
                stop string, prompt logprobs]
    logprob  = [[token id, bytes, logprob], [likeliest tokens, in the same form]]
    prompt logprobs = [[first, number of likeliest tokens, token ids, logprobs, ranks,
                [[token id, bytes]]]], see `PromptLogprobs`
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack  # type: ignore[import-untyped] # ships no types

from deployments.contract.output import (
    FinishReason,
    PromptLogprobs,
    TextDelta,
    TokenLogprob,
    TokenLogprobs,
)

VERSION: Final = 5
MAX_INGRESS_BYTES: Final = 256
"""The most bytes of a hello, and of a go-ahead."""

MAX_MESSAGE_BYTES: Final = 64 * 2**20
"""Far more than a message of deltas takes, which `outbox.MAX_WEIGHT` bounds."""

MAX_SILENCE_S: Final = 5.0
"""A replica that sends nothing for so long is taken for lost; it sends something every second."""

MIN_INTERVAL_S: Final = 0.01
"""Least time between two messages, and between two events of a stream but for its first and last: a
hundred a second are more than a reader or a screen can take in."""

_LENGTH_BYTES: Final = 4
_UNICODE_ERRORS: Final = "surrogatepass"

Entry = tuple[int, TextDelta]
"""A stream's number and what it has gained."""


class WireError(Exception):
    """The other side sent something that is no valid message."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What an ingress says first.

    Attributes:
        secret: The replica's secret, which `Accepted` carried.
        channel_id: The name under which the ingress's requests ask for deltas.
    """

    secret: bytes = field(repr=False)
    channel_id: str


def encode_hello(hello: Hello) -> bytes:
    """Return the frame of a hello."""
    return encode_frame([VERSION, hello.secret, hello.channel_id])


def decode_hello(payload: bytes) -> Hello:
    """Return the hello in a frame's payload.

    Raises:
        WireError: It is malformed, or of another version.
    """
    match decode_value(payload):
        case [int(version), bytes(secret), str(channel_id)] if version == VERSION:
            return Hello(secret, channel_id)
    raise WireError("this is no hello of this version")


def encode_go_ahead(number: int) -> bytes:
    """Return the frame that lets a suspect begin."""
    return encode_frame([number])


def decode_go_ahead(payload: bytes) -> int:
    """Return the number of the suspect that may begin.

    Raises:
        WireError: It is no go-ahead.
    """
    match decode_value(payload):
        case [int(number)]:
            return number
    raise WireError("this is no go-ahead")


def encode_message(entries: Iterable[Entry]) -> bytes:
    """Return the frame of a message; without entries it is a heartbeat."""
    return encode_frame([_entry(number, delta) for number, delta in entries])


def decode_message(payload: bytes) -> list[Entry]:
    """Return the entries of a message.

    Raises:
        WireError: It is malformed.
    """
    try:
        return [(entry[0], _delta(*entry[1:])) for entry in decode_value(payload)]
    except (TypeError, ValueError, LookupError) as error:
        raise WireError("this is no message of deltas") from error


class FrameReader:
    """Cuts a stream of bytes into the payloads of its frames.

    Attributes:
        max_bytes: The most bytes of a payload.
    """

    def __init__(self, max_bytes: int) -> None:
        """Start at the beginning of a frame.

        Args:
            max_bytes: The most bytes of a payload.
        """
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads that these bytes complete.

        Raises:
            WireError: A payload would be too long.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH_BYTES:
            length = int.from_bytes(self._buffer[:_LENGTH_BYTES])
            if length > self.max_bytes:
                raise WireError(f"a frame of {length} bytes is too long")
            end = _LENGTH_BYTES + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            yield payload


def is_of_call(payload: bytes) -> bool:
    """Return whether a frame carries a pooled request or an answer: a map of at most one entry."""
    return payload[:1] in (b"\x80", b"\x81")


def encode_frame(value: object) -> bytes:
    """Return the frame of any value."""
    payload: bytes = msgpack.packb(value, unicode_errors=_UNICODE_ERRORS)
    return len(payload).to_bytes(_LENGTH_BYTES) + payload


GIVEN_UP: Final = encode_frame([])
"""Says that the ingress takes the replica for lost, and has moved its streams."""


def says_given_up(payload: bytes) -> bool:
    """Return whether an ingress takes the replica for lost."""
    return payload == GIVEN_UP[_LENGTH_BYTES:]


def decode_value(payload: bytes) -> Any:
    """Return the value of a frame's payload; its arrays are tuples.

    Raises:
        WireError: It is no msgpack value.
    """
    try:
        return msgpack.unpackb(
            payload, use_list=False, strict_map_key=False, unicode_errors=_UNICODE_ERRORS
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError("this is no msgpack value") from error


def _entry(number: int, delta: TextDelta) -> tuple[object, ...]:
    has_more = delta.logprobs or delta.num_cached_tokens or delta.prompt_logprobs
    if delta.finish_reason is None and not has_more:
        return number, delta.token_ids, delta.text
    return (
        number,
        delta.token_ids,
        delta.text,
        None if delta.finish_reason is None else delta.finish_reason.value,
        delta.error,
        [(_triple(each.chosen), [_triple(top) for top in each.top]) for each in delta.logprobs],
        delta.num_cached_tokens,
        delta.stop,
        [
            (each.first, each.num_top, each.token_ids, each.logprobs, each.ranks, each.token_bytes)
            for each in delta.prompt_logprobs
        ],
    )


def _delta(
    token_ids: tuple[int, ...],
    text: str,
    finish_reason: str | None = None,
    error: str | None = None,
    logprobs: tuple[Any, ...] = (),
    num_cached_tokens: int = 0,
    stop: str | None = None,
    prompt_logprobs: tuple[Any, ...] = (),
) -> TextDelta:
    has_more = logprobs or num_cached_tokens or prompt_logprobs
    if finish_reason is None and not has_more:
        return TextDelta(token_ids, text)
    return TextDelta(
        token_ids,
        text,
        None if finish_reason is None else FinishReason(finish_reason),
        error,
        tuple(
            TokenLogprobs(TokenLogprob(*chosen), tuple(TokenLogprob(*each) for each in top))
            for chosen, top in logprobs
        ),
        num_cached_tokens,
        stop,
        prompt_logprobs=tuple(PromptLogprobs(*each) for each in prompt_logprobs),
    )


def _triple(token: TokenLogprob) -> tuple[int, bytes, float]:
    return token.token_id, token.token_bytes, token.logprob
