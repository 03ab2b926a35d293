"""The `id` of a Server-Sent Event: how much of an answer was sent when the event ends.

A client that has lost its connection sends the same request again, with the last id that it has got
in `Last-Event-ID`. Any ingress can go on from there: the id holds what it takes to generate the
same answer again, to see that it is the same, and to know where to go on. So nothing is stored.

An id is base64url of a head (version, seed, digest) and of one part for each choice, in order, up
to the last one that has sent anything. Then a mark may follow behind a point: the usage was sent,
or everything. Head and parts are multiples of three bytes, so each can be encoded by itself.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#the-last-event-id-header
"""

import re
import zlib
from base64 import urlsafe_b64decode
from binascii import b2a_base64
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from struct import Struct, pack
from typing import Final, NamedTuple, Self

from starlette.datastructures import Headers

from deployments.contract.errors import InvalidRequestError
from deployments.contract.sampling_params import MAX_SEED
from serve_app.config import MAX_NUM_CHOICES

LAST_EVENT_ID: Final = "Last-Event-ID"
VERSION: Final = 1
DIGEST_BYTES: Final = 9

_HEAD: Final = Struct(f">BQ{DIGEST_BYTES}s")
_PART: Final = Struct(">III")
_HEAD_LENGTH: Final = _HEAD.size // 3 * 4
_PART_LENGTH: Final = _PART.size // 3 * 4
_URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")
_VALID: Final = re.compile(
    rf"([\w-]{{{_HEAD_LENGTH}}})((?:[\w-]{{{_PART_LENGTH}}}){{0,{MAX_NUM_CHOICES}}})(?:\.([a-z]+))?",
    re.ASCII,
)


class Mark(StrEnum):
    """What was sent after all choices."""

    USAGE = "usage"
    DONE = "done"


class SentPart(NamedTuple):
    """What was sent of one choice.

    Attributes:
        num_tokens: Tokens that had arrived by then; the log-probabilities of all of them were sent.
        size: How much of their content was sent, as `ChoiceFramer.size` measures it. Some of it may
            be held back, and one token may bring several events.
        checksum: Of these tokens' ids.
    """

    num_tokens: int = 0
    size: int = 0
    checksum: int = 0


NOTHING: Final = SentPart()


def checksum(token_ids: Sequence[int], before: int = 0) -> int:
    """Return the checksum of token ids that follow others.

    Args:
        token_ids: The ids.
        before: The checksum of the ids before them; 0 if there are none.
    """
    return zlib.crc32(pack(f"<{len(token_ids)}I", *token_ids), before)


@dataclass(frozen=True, slots=True)
class EventId:
    """A decoded id.

    Attributes:
        seed: The answer's seed, drawn by the server if the request has none.
        digest: Of what the answer depends on besides; `DIGEST_BYTES` long.
        parts: What was sent of each choice, without the last choices that have sent nothing.
        mark: What was sent after the choices.
    """

    seed: int
    digest: bytes
    parts: tuple[SentPart, ...] = ()
    mark: Mark | None = None

    @classmethod
    def decode(cls, text: str) -> Self:
        """Return the id in a header.

        Raises:
            InvalidRequestError: It is none of ours, or of another version of the format.
        """
        found = _VALID.fullmatch(text)
        if found is None:
            raise _malformed("it is none that this server sends")
        version, seed, digest = _HEAD.unpack(urlsafe_b64decode(found[1]))
        if version != VERSION:
            raise _malformed(f"its format is version {version}, and this server knows {VERSION}")
        if seed > MAX_SEED or found[3] not in (None, *Mark):
            raise _malformed("it is none that this server sends")
        parts = tuple(SentPart(*part) for part in _PART.iter_unpack(urlsafe_b64decode(found[2])))
        return cls(seed, digest, parts, None if found[3] is None else Mark(found[3]))


@dataclass(slots=True)
class _Sent:
    """What was sent of one choice until now; see `SentPart`. Each event changes it in place."""

    num_tokens: int
    size: int
    checksum: int


class EventIds:
    """Gives each event of one answer its id."""

    def __init__(self, seed: int, digest: bytes, num_choices: int, last: EventId | None) -> None:
        """Start before the first event, or behind the last one that the client has got.

        Args:
            seed: The answer's seed.
            digest: Of what it depends on besides.
            num_choices: Number of its choices.
            last: The id of the client's last event; None if it has got none.
        """
        self._head = _base64url(_HEAD.pack(VERSION, seed, digest))
        given = () if last is None else last.parts
        parts = [*given, *(NOTHING,) * (num_choices - len(given))]
        self._sent = [_Sent(*part) for part in parts]
        # The tokens of what the client has got arrive once more.
        self._num_known = [part.num_tokens for part in parts]
        self._encoded = [_encoded(*part) for part in given]

    def gained(self, index: int, token_ids: Sequence[int]) -> bool:
        """Note tokens of a choice; return whether the client has got what came from them.

        Those that it has got come first, and are not mixed with others.
        """
        if self._num_known[index]:
            self._num_known[index] -= len(token_ids)
            return True
        sent = self._sent[index]
        sent.num_tokens += len(token_ids)
        sent.checksum = checksum(token_ids, sent.checksum)
        return False

    def sent(self, index: int, size: int, event: bytes) -> bytes:
        """Return a choice's event with its id.

        Args:
            index: The choice's.
            size: How much it adds to what was sent of the choice.
            event: The framed event.
        """
        sent = self._sent[index]
        sent.size += size
        while len(self._encoded) <= index:
            self._encoded.append(_encoded(*NOTHING))
        self._encoded[index] = _encoded(sent.num_tokens, sent.size, sent.checksum)
        return b"id: %b%b\n%b" % (self._head, b"".join(self._encoded), event)

    def marked(self, mark: Mark, event: bytes) -> bytes:
        """Return an event behind all choices with its id."""
        parts = b"".join(self._encoded)
        return b"id: %b%b.%b\n%b" % (self._head, parts, mark.encode(), event)


def refuse_last_event_id(headers: Headers) -> None:
    """Refuse to resume a stream on a route whose streams have no ids.

    Raises:
        InvalidRequestError: The header is there.
    """
    if headers.get(LAST_EVENT_ID):
        raise InvalidRequestError(
            f"{LAST_EVENT_ID} can't be honoured: only streams of /v1/chat/completions and "
            "/v1/completions can be resumed. Leave the header out.",
            LAST_EVENT_ID,
        )


def _encoded(num_tokens: int, size: int, checksum: int) -> bytes:
    return _base64url(_PART.pack(num_tokens, size, checksum))


def _base64url(data: bytes) -> bytes:
    # Each event passes here; `urlsafe_b64encode` takes twice as long.
    return b2a_base64(data, newline=False).translate(_URL_SAFE)


def _malformed(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{LAST_EVENT_ID} can't be read: {why}. Send the id of the last event as it came, or leave "
        "the header out to get the whole answer.",
        LAST_EVENT_ID,
    )
