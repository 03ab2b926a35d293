"""Bounds on the structure of an image file, so that opening and decoding it stays cheap.

Bytes and pixels alone don't bound that cost. Decoders read every chunk of a PNG, and a colour
profile of a thousand bytes may take milliseconds to unpack. Each scan of a JPEG passes over all
pixels, and a scan needs only thirty bytes. A file of several megabytes has room for thousands of
either. A file that passes here is cheap for the ingress, which reads its header, and for the
model's replica, which decodes it.

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
"""Most chunks of a PNG: four times as many as 16 MiB of pixels fill at 4 KiB a chunk."""

MAX_NUM_SEGMENTS: Final = 2**14
"""Most segments of a JPEG: metadata takes one per 64 KiB, tables one or two per scan."""

MAX_NUM_SCANS: Final = 64
"""Most scans of a JPEG: progressive files have about ten."""

MAX_NUM_READS: Final = 2**15
"""Most reads of a header: each part takes a few, a normal file some hundreds."""

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_CHUNK: Final = struct.Struct(">I4s")
_NUM_CHECK_BYTES: Final = 4

_JPEG: Final = b"\xff\xd8"
# Leaves out markers inside a scan (0 and restarts) and those without a length (the start, and 1).
_MARKER: Final = re.compile(rb"\xff([^\x00\x01\xff\xd0-\xd8])")
_SCAN, _END = b"\xda", b"\xd9"


class CrowdedImageError(ValueError):
    """A file holds more parts than any normal one."""


class HeaderFile(BytesIO):
    """An image file that limits the number of reads."""

    _num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes.

        Raises:
            CrowdedImageError: There were too many reads.
        """
        self._num_reads += 1
        if self._num_reads > MAX_NUM_READS:
            raise CrowdedImageError
        return super().read(size)


def open_header(data: bytes) -> HeaderFile:
    """Return an image file to read the header from.

    Raises:
        CrowdedImageError: It is a PNG with too many chunks or more than one colour profile, or a
            JPEG with too many segments or scans.
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
    """Yield the kinds of a PNG's chunks, up to the final one."""
    start, kind = len(_PNG), b""
    while kind != b"IEND" and start + _CHUNK.size <= len(data):
        num_bytes, kind = _CHUNK.unpack_from(data, start)
        yield kind
        start += _CHUNK.size + num_bytes + _NUM_CHECK_BYTES


def _segment_kinds(data: bytes) -> Iterator[bytes]:
    """Yield the kinds of a JPEG's segments, up to the end marker."""
    start, kind = len(_JPEG), b""
    while kind != _END and (marker := _MARKER.search(data, start)):
        kind, start = marker[1], marker.end()
        yield kind
        start += int.from_bytes(data[start : start + 2])
