"""What reading an image's header may cost, whatever stands in it.

Decoders read all that comes before the pixels, and of a PNG all that comes behind them: a chunk of
a thousand bytes may hold a colour profile that takes milliseconds to unpack, and megabytes have
room for thousands of them, or for a million chunks of nothing. What passes here is cheap to open,
now and at the model's replica.

Source: https://www.w3.org/TR/png-3/#5DataRep (chunks)
"""

import struct
from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from typing import Final

MAX_NUM_CHUNKS: Final = 2**14
"""Of a PNG: four times as many as 16 MiB of pixels make in pieces of 4 KiB."""

MAX_NUM_READS: Final = 2**15
"""Pieces that a header is read in: each marker and each chunk takes a few, an honest file some
hundreds in all."""

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_CHUNK: Final = struct.Struct(">I4s")
_NUM_CHECK_BYTES: Final = 4


class CrowdedHeaderError(ValueError):
    """A header holds more parts than any honest one."""


class HeaderFile(BytesIO):
    """An image's file that is not read in too many pieces."""

    _num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes.

        Raises:
            CrowdedHeaderError: This is one piece too many.
        """
        self._num_reads += 1
        if self._num_reads > MAX_NUM_READS:
            raise CrowdedHeaderError
        return super().read(size)


def open_header(data: bytes) -> HeaderFile:
    """Return a file to read a header from.

    Raises:
        CrowdedHeaderError: It is a PNG of too many chunks, or with more than one colour profile.
    """
    if data.startswith(_PNG):
        kinds = list(islice(_chunk_kinds(data), MAX_NUM_CHUNKS + 1))
        if len(kinds) > MAX_NUM_CHUNKS or kinds.count(b"iCCP") > 1:
            raise CrowdedHeaderError
    return HeaderFile(data)


def _chunk_kinds(data: bytes) -> Iterator[bytes]:
    """Yield the kinds of a PNG's chunks, up to the one that ends it."""
    start, kind = len(_PNG), b""
    while kind != b"IEND" and start + _CHUNK.size <= len(data):
        num_bytes, kind = _CHUNK.unpack_from(data, start)
        yield kind
        start += _CHUNK.size + num_bytes + _NUM_CHECK_BYTES
