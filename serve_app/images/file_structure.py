"""What opening and decoding an image's file may cost, whatever stands in it.

Bytes and pixels alone don't bound that. Of a PNG, decoders read every chunk, and a thousand bytes
may hold a colour profile that takes milliseconds to unpack; of a JPEG, each scan passes over all
pixels, and thirty bytes make one. Megabytes have room for thousands of those. What passes here is
cheap in the ingress, which reads the header, and at the model's replica, which reads it all.

Source: https://www.w3.org/TR/png-3/#5DataRep (chunks)
https://www.w3.org/Graphics/JPEG/itu-t81.pdf (annex B, markers)
"""

import re
import struct
from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from typing import Final

MAX_NUM_CHUNKS: Final = 2**14
"""Of a PNG: four times as many as 16 MiB of pixels make in pieces of 4 KiB."""

MAX_NUM_SEGMENTS: Final = 2**14
"""Of a JPEG: metadata comes in segments of 64 KiB, tables in one or two for each scan."""

MAX_NUM_SCANS: Final = 64
"""Of a JPEG: progressive ones have ten or so."""

MAX_NUM_READS: Final = 2**15
"""Pieces that a header is read in: each part of one takes a few, an honest file some hundreds."""

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_CHUNK: Final = struct.Struct(">I4s")
_NUM_CHECK_BYTES: Final = 4

_JPEG: Final = b"\xff\xd8"
# Beside what stands within a scan (0 and restarts) and what has no length (the start, and 1).
_MARKER: Final = re.compile(rb"\xff([^\x00\x01\xff\xd0-\xd8])")
_SCAN, _END = b"\xda", b"\xd9"


class CrowdedImageError(ValueError):
    """A file holds more parts than any honest one."""


class HeaderFile(BytesIO):
    """An image's file that is not read in too many pieces."""

    _num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes.

        Raises:
            CrowdedImageError: This is one piece too many.
        """
        self._num_reads += 1
        if self._num_reads > MAX_NUM_READS:
            raise CrowdedImageError
        return super().read(size)


def open_header(data: bytes) -> HeaderFile:
    """Return an image's file to read its header from.

    Raises:
        CrowdedImageError: It is a PNG of too many chunks or with more than one colour profile, or a
            JPEG of too many segments or scans.
    """
    if data.startswith(_PNG):
        _bound(_chunk_kinds(data), MAX_NUM_CHUNKS, b"iCCP", 1)
    elif data.startswith(_JPEG):
        _bound(_segment_kinds(data), MAX_NUM_SEGMENTS, _SCAN, MAX_NUM_SCANS)
    return HeaderFile(data)


def _bound(kinds: Iterator[bytes], max_num: int, dear: bytes, max_num_dear: int) -> None:
    found = list(islice(kinds, max_num + 1))
    if len(found) > max_num or found.count(dear) > max_num_dear:
        raise CrowdedImageError


def _chunk_kinds(data: bytes) -> Iterator[bytes]:
    """Yield the kinds of a PNG's chunks, up to the one that ends it."""
    start, kind = len(_PNG), b""
    while kind != b"IEND" and start + _CHUNK.size <= len(data):
        num_bytes, kind = _CHUNK.unpack_from(data, start)
        yield kind
        start += _CHUNK.size + num_bytes + _NUM_CHECK_BYTES


def _segment_kinds(data: bytes) -> Iterator[bytes]:
    """Yield the kinds of a JPEG's segments, up to the mark that ends it."""
    start, kind = len(_JPEG), b""
    while kind != _END and (marker := _MARKER.search(data, start)):
        kind, start = marker[1], marker.end()
        yield kind
        start += int.from_bytes(data[start : start + 2])
