import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from deployments.errors import InvalidImageError
from serve_app.config import LimitsConfig
from serve_app.image_headers import MAX_NUM_CHUNKS, MAX_NUM_READS, CrowdedHeaderError, open_header
from serve_app.images import check_image
from tests.serve_app.test_images import encoded

Crowd = Callable[[int], bytes]

PNG, JPEG, GIF = encoded("PNG"), encoded("JPEG"), encoded("GIF")
HEADER_END = 33
"""Where a PNG's first chunk ends."""
NUM_PNG_CHUNKS = 3


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


PROFILE = chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(2**20 - 1)))
"""A thousand bytes that make a million."""


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
def test_a_png_has_one_profile_and_not_too_many_chunks(crowd: Crowd, num_allowed: int) -> None:
    data = crowd(num_allowed)
    assert check_image(data, ("PNG",), LimitsConfig(), "p").data == data
    with Image.open(BytesIO(data)) as image:
        image.load()  # the chunks are well-formed, so nothing else refuses more of them
    with pytest.raises(InvalidImageError, match="too many parts") as caught:
        check_image(crowd(num_allowed + 1), ("PNG",), LimitsConfig(), "p")
    assert caught.value.param == "p"


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
def test_a_header_is_read_in_so_many_pieces_and_no_more(crowd: Crowd) -> None:
    assert check_image(crowd(1000), None, LimitsConfig(), "p")
    with pytest.raises(InvalidImageError, match="too many parts"):
        check_image(crowd(MAX_NUM_READS), None, LimitsConfig(), "p")


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_photograph_with_all_its_metadata_passes(image_format: str) -> None:
    file, exif = BytesIO(), Image.Exif()
    exif[0x010E] = "x" * 60_000
    Image.effect_noise((1024, 1024), 99).convert("RGB").save(
        file, image_format, exif=exif, icc_profile=bytes(500_000), comment=b"x" * 60_000
    )
    assert check_image(file.getvalue(), None, LimitsConfig(), "p")


@given(st.binary(max_size=100))
def test_whatever_stands_behind_a_png_s_name_is_opened_or_refused(data: bytes) -> None:
    with suppress(CrowdedHeaderError):
        assert open_header(PNG[:8] + data).getvalue() == PNG[:8] + data
