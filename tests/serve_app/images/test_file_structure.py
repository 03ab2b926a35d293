import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from deployments.contract.errors import InvalidImageError
from serve_app.config import LimitsConfig
from serve_app.images.file_structure import (
    MAX_NUM_CHUNKS,
    MAX_NUM_READS,
    MAX_NUM_SCANS,
    MAX_NUM_SEGMENTS,
    CrowdedImageError,
    open_header,
)
from serve_app.images.images import check_image
from tests.serve_app.images.test_images import encoded

Crowd = Callable[[int], bytes]

PNG, JPEG, GIF = encoded("PNG"), encoded("JPEG"), encoded("GIF")
HEADER_END = 33
"""The offset at which a PNG's first chunk ends."""
NUM_PNG_CHUNKS = 3
SCAN = b"\xff\xda"


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


PROFILE = chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(2**20 - 1)))
"""A thousand bytes that unpack to a million."""


def in_front(part: bytes) -> Crowd:
    return lambda number: PNG[:HEADER_END] + part * number + PNG[HEADER_END:]


def behind(part: bytes) -> Crowd:
    end = len(PNG) - len(chunk(b"IEND"))
    return lambda number: PNG[:end] + part * number + PNG[end:]


def of_jpeg(part: bytes) -> Crowd:
    return lambda number: JPEG[:2] + part * number + JPEG[2:]


def of_gif(part: bytes) -> Crowd:
    palette_end = 13 + 3 * (2 << (GIF[10] & 7))
    return lambda number: GIF[:palette_end] + part * number + GIF[palette_end:]


def scans(number: int, hidden: Callable[[bytes], bytes] = bytes) -> bytes:
    """Return a JPEG with this many scans; all after the first ones are equal."""
    file = BytesIO()
    Image.new("L", (8, 8)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    num_own, last, end = data.count(SCAN), data.rindex(SCAN), len(data) - 2
    return data[:end] + hidden(data[last:end]) * (number - num_own) + data[end:]


@pytest.mark.parametrize(
    ("crowd", "num_allowed"),
    [
        (in_front(PROFILE), 1),
        (behind(PROFILE), 1),
        (behind(chunk(b"tEXt", b"a\0b")), MAX_NUM_CHUNKS - NUM_PNG_CHUNKS),
        (behind(chunk(b"aaAa")), MAX_NUM_CHUNKS - NUM_PNG_CHUNKS),
    ],
    ids=["profiles", "profiles behind the pixels", "texts", "chunks of nothing"],
)
def test_a_png_with_two_profiles_or_too_many_chunks_is_refused(
    crowd: Crowd, num_allowed: int
) -> None:
    data = crowd(num_allowed)
    assert check_image(data, LimitsConfig(), "p").data == data
    with Image.open(BytesIO(data)) as image:
        image.load()  # the chunks are well-formed, so only their number can be refused
    with pytest.raises(InvalidImageError, match="too many parts") as caught:
        check_image(crowd(num_allowed + 1), LimitsConfig(), "p")
    assert caught.value.param == "p"


def test_a_jpeg_with_too_many_scans_is_refused() -> None:
    data = scans(MAX_NUM_SCANS)
    assert check_image(data, LimitsConfig(), "p").data == data
    with Image.open(BytesIO(scans(MAX_NUM_SCANS + 1))) as image:
        image.load()  # only their number can be refused
    with pytest.raises(InvalidImageError, match="too many parts"):
        check_image(scans(MAX_NUM_SCANS + 1), LimitsConfig(), "p")


@pytest.mark.parametrize(
    "hidden",
    [
        lambda scan: b"rubbish" + scan,
        lambda scan: b"\xff\xff\xff" + scan,
        lambda scan: b"\xff\xd3\xff\x00\xff\x01" + scan,
        lambda scan: b"\xff\xfe\0\4ab" + scan,
    ],
    ids=["rubbish", "fill bytes", "restarts", "comments"],
)
def test_no_scan_escapes_the_count(hidden: Callable[[bytes], bytes]) -> None:
    with pytest.raises(CrowdedImageError):
        open_header(scans(MAX_NUM_SCANS + 1, hidden))


def test_bytes_outside_the_images_scans_do_not_count() -> None:
    marks = b"\xff\xda\0\2" * MAX_NUM_SCANS
    comment = b"\xff\xfe" + struct.pack(">H", 2 + len(marks)) + marks
    data = JPEG[:2] + comment + JPEG[2:] + marks
    assert check_image(data, LimitsConfig(), "p").data == data


@pytest.mark.parametrize(
    "crowd",
    [
        in_front(chunk(b"aaAa")),
        of_jpeg(b"\xff\xfe\0\2"),
        of_jpeg(b"\xff"),
        of_gif(b"!\xfe\1x\0"),
        of_gif(b"\0"),
    ],
    ids=["chunks", "comments of a JPEG", "fill bytes", "comments of a GIF", "what is no GIF"],
)
def test_a_file_may_have_the_maximum_of_parts_and_no_more(crowd: Crowd) -> None:
    assert check_image(crowd(1000), LimitsConfig(), "p")
    with pytest.raises(InvalidImageError, match="too many parts"):
        check_image(crowd(max(MAX_NUM_READS, MAX_NUM_SEGMENTS)), LimitsConfig(), "p")


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_photograph_with_all_its_metadata_passes(image_format: str) -> None:
    file, exif = BytesIO(), Image.Exif()
    exif[0x010E] = "x" * 60_000
    Image.effect_noise((1024, 1024), 99).convert("RGB").save(
        file,
        image_format,
        exif=exif,
        icc_profile=bytes(500_000),
        comment=b"x" * 60_000,
        progressive=True,
    )
    assert check_image(file.getvalue(), LimitsConfig(), "p")


@given(st.sampled_from([PNG[:8], JPEG[:2]]), st.binary(max_size=100))
def test_any_bytes_after_a_signature_are_opened_or_refused(name: bytes, data: bytes) -> None:
    with suppress(CrowdedImageError):
        assert open_header(name + data).getvalue() == name + data
