"""Every mode of every format against a reference: the samples that were written, by arithmetic."""

import struct
import subprocess
import sys
import zlib
from base64 import b64encode
from collections.abc import Iterator
from io import BytesIO
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageOps

from deployments.contract.errors import InvalidImageError
from deployments.generator.images import decode_image
from tests.offenders import every

Samples = npt.NDArray[np.integer[Any]]

RANDOM = np.random.default_rng(7)
ORIENTATION: Final = 0x0112
GRAY, RGB, PALETTE, GRAY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6
NUM_CHANNELS = {GRAY: 1, RGB: 3, PALETTE: 1, GRAY_ALPHA: 2, RGB_ALPHA: 4}
PNG_LAYOUTS = [
    *product([GRAY], [1, 2, 4, 8, 16]),
    *product([PALETTE], [1, 2, 4, 8]),
    *product([RGB, GRAY_ALPHA, RGB_ALPHA], [8, 16]),
]
"""Source: https://www.w3.org/TR/png-3/#table111"""
COLORS = RANDOM.integers(0, 256, (256, 3))
ALPHAS = RANDOM.integers(0, 256, 256)


def chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def png(samples: Samples, layout: tuple[int, int], *more: bytes) -> bytes:
    """Return a PNG of samples [height, width, channels], with more chunks before its pixels."""
    kind, num_bits = layout
    height, width, _ = samples.shape
    bits = np.unpackbits(samples.astype(">u2").view(np.uint8)).reshape(height, -1, 16)
    rows = np.packbits(bits[:, :, 16 - num_bits :].reshape(height, -1), axis=1)
    header = struct.pack(">IIBBBBB", width, height, num_bits, kind, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    chunks = [chunk(b"IHDR", header), *more, chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def on_white(colors: Samples, alphas: Samples) -> Samples:
    """Return colors [height, width, 3] before white, by alphas [height, width], all to 255."""
    share = alphas[:, :, None] / 255
    return np.rint(colors * share + 255 * (1 - share)).astype(int)


def as_seen(samples: Samples, layout: tuple[int, int]) -> Samples:
    """Return what a PNG shows before white, without a transparent color."""
    kind, num_bits = layout
    if kind == PALETTE:
        return COLORS[samples[:, :, 0]]
    samples = samples >> 8 if num_bits == 16 else samples * 255 // (2**num_bits - 1)
    if kind in (GRAY, RGB):
        return np.broadcast_to(samples, (*samples.shape[:2], 3))
    colors = np.broadcast_to(samples[:, :, :-1], (*samples.shape[:2], 3))
    return on_white(colors, samples[:, :, -1])


def pngs() -> Iterator[tuple[str, bytes, Samples]]:
    """Yield each kind of PNG, with its name and what it shows."""
    for kind, num_bits in PNG_LAYOUTS:
        layout = kind, num_bits
        samples = RANDOM.integers(0, 2**num_bits, (5, 9, NUM_CHANNELS[kind]))
        shown = as_seen(samples, layout)
        palette = [chunk(b"PLTE", COLORS[: 2**num_bits].astype(np.uint8).tobytes())]
        colors = palette if kind == PALETTE else []
        yield f"{layout}", png(samples, layout, *colors), shown
        if kind == PALETTE:
            alphas = ALPHAS[: 2**num_bits]
            clear = chunk(b"tRNS", alphas.astype(np.uint8).tobytes())
            shown = on_white(shown, alphas[samples[:, :, 0]])
            yield f"{layout} with alphas", png(samples, layout, *colors, clear), shown
            clear = chunk(b"tRNS", b"\xff\0")
            shown = np.where(samples == 1, 255, COLORS[samples[:, :, 0]])
            yield f"{layout} with one clear", png(samples, layout, *colors, clear), shown
        elif kind in (GRAY, RGB):
            clear = chunk(b"tRNS", samples[2, 3].astype(">u2").tobytes())
            is_clear = (samples == samples[2, 3]).all(axis=2, keepdims=True)
            yield (
                f"{layout} with clear",
                png(samples, layout, clear),
                np.where(is_clear, 255, shown),
            )


def gifs() -> Iterator[tuple[str, bytes, Samples]]:
    indices = RANDOM.integers(0, 4, (5, 9), dtype=np.uint8)
    image = Image.fromarray(indices)
    yield "gray GIF", saved(image, "GIF"), np.repeat(indices[:, :, None], 3, axis=2)
    image.putpalette(COLORS[:4].astype(np.uint8).tobytes())
    yield "GIF", saved(image, "GIF"), COLORS[indices]
    shown = np.where(indices[:, :, None] == 2, 255, COLORS[indices])
    yield "GIF with clear", saved(image, "GIF", transparency=2, optimize=False), shown
    other = Image.new("P", image.size)
    file = saved(image, "GIF", save_all=True, append_images=[other])
    yield "animated GIF", file, COLORS[indices]
    whole = bytearray(saved(image, "GIF", optimize=False))
    whole[6:10] = struct.pack("<HH", 12, 8)
    at = whole.index(struct.pack("<BHHHH", 0x2C, 0, 0, 9, 5))
    whole[at + 1 : at + 5] = struct.pack("<HH", 2, 3)
    page = np.full((8, 12, 3), 255)
    page[3:8, 2:11] = COLORS[indices]
    yield "GIF with a frame in its canvas", bytes(whole), page


def webps() -> Iterator[tuple[str, bytes, Samples]]:
    pixels = RANDOM.integers(0, 256, (5, 9, 4), dtype=np.uint8)
    opaque, clear = Image.fromarray(pixels[:, :, :3]), Image.fromarray(pixels)
    shown = on_white(pixels[:, :, :3], pixels[:, :, 3])
    yield "WebP", saved(opaque, "WEBP", lossless=True), pixels[:, :, :3]
    yield "WebP with alpha", saved(clear, "WEBP", lossless=True, exact=True), shown
    options = {"lossless": True, "exact": True, "save_all": True}
    file = saved(clear, "WEBP", append_images=[Image.new("RGBA", clear.size)], **options)
    yield "animated WebP", file, shown


def jpegs() -> Iterator[tuple[str, bytes, Samples]]:
    """Yield JPEGs of one color, which their compression hardly changes."""
    for mode, color, rgb in (
        ("L", 90, (90, 90, 90)),
        ("RGB", (10, 200, 90), (10, 200, 90)),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
        ("CMYK", (51, 102, 0, 128), (102, 76, 127)),
        ("CMYK", (0, 0, 0, 0), (255, 255, 255)),
    ):
        shown = np.broadcast_to(np.array(rgb), (16, 16, 3))
        image = Image.new(mode, (16, 16), color)
        yield f"{mode} {color} JPEG", saved(image, "JPEG", quality=100, subsampling=0), shown
    image = Image.new("RGB", (16, 16), "red")
    file = saved(image, "MPO", quality=100, save_all=True, append_images=[image.rotate(9)])
    yield "JPEG of several pictures", file, np.broadcast_to(np.array((255, 0, 0)), (16, 16, 3))


def test_every_mode_of_every_format_is_what_a_person_sees() -> None:
    for case in every(
        (of_kind, allowed, name, data, shown)
        for of_kind, allowed in ((pngs, 0), (gifs, 0), (webps, 0), (jpegs, 3))
        for name, data, shown in of_kind()
    ):
        with case as (_of_kind, allowed, _name, data, shown):
            picture = decode_image(data)
            assert picture.mode == "RGB"
            assert np.abs(np.asarray(picture).astype(int) - shown).max() <= allowed


def test_every_orientation_is_made_upright() -> None:
    pixels = RANDOM.integers(0, 256, (5, 9, 4), dtype=np.uint8)
    for case in every(product(["PNG", "WEBP", "JPEG"], [0, *range(1, 9), 9, 600])):
        with case as (kind, orientation):
            exif = Image.Exif()
            exif[ORIENTATION] = orientation
            image = Image.fromarray(pixels[:, :, : 3 if kind == "JPEG" else 4])
            data = saved(image, kind, exif=exif, lossless=True)
            turned = ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGBA")
            page = Image.new("RGBA", turned.size, "white")
            page.alpha_composite(turned)
            expected = np.asarray(page.convert("RGB")).astype(int)
            assert np.abs(np.asarray(decode_image(data)) - expected).max() <= 1


def test_a_portrait_photo_stands() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    lying = Image.new("RGB", (40, 20), "white")
    lying.paste("black", (0, 0, 20, 20))
    picture = decode_image(saved(lying, "JPEG", exif=exif)).convert("L")
    assert picture.size == (20, 40)
    assert picture.getpixel((10, 5)) == 0, "the photo's left is the picture's top"
    assert picture.getpixel((10, 35)) == 255


def test_the_orientation_in_xmp_counts_if_exif_has_none() -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'
    assert decode_image(saved(Image.new("RGB", (9, 5)), "JPEG", xmp=xmp)).size == (5, 9)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_broken_metadata_turns_nothing() -> None:
    image = Image.new("RGB", (9, 5), "red")
    crowd = struct.pack("<2sHIH", b"II", 42, 8, 4000)
    crowd += b"".join(struct.pack("<HHII", tag, 7, 10**6, 0) for tag in range(300, 4300))
    broken = [
        b"",
        b"x",
        b"Exif\0\0",
        b"Exif\0\0MM\0*",
        b"II*\0\xff\xff\xff\xff",
        b"Exif\0\0" + crowd,
    ]
    for case in every(product(["PNG", "WEBP", "JPEG"], broken)):
        with case as (kind, exif):
            assert decode_image(saved(image, kind, exif=exif)).size == image.size


@pytest.mark.parametrize("name", ["transparency", "exif", "xmp", "Raw profile type exif", "dpi"])
def test_the_text_of_a_png_is_only_text(name: str) -> None:
    text = chunk(b"tEXt", name.encode() + b"\0" + b'\n\n\nzz tiff:Orientation="6"')
    for kind, num_bits in PNG_LAYOUTS:
        samples = np.zeros((5, 9, NUM_CHANNELS[kind]), int)
        palette = [chunk(b"PLTE", b"abc")] if kind == PALETTE else []
        plain = png(samples, (kind, num_bits), *palette)
        named = png(samples, (kind, num_bits), *palette, text)
        assert decode_image(named).tobytes() == decode_image(plain).tobytes()


def test_whatever_a_decoder_raises_for_a_broken_file_is_an_invalid_image() -> None:
    samples = np.zeros((5, 9, 1), int)
    without_palette = png(samples, (PALETTE, 8))
    whole = png(samples, (GRAY, 8))
    end = chunk(b"IEND", b"")
    late_profile = whole.removesuffix(end) + chunk(b"iCCP", b"") + end
    for data in (without_palette, late_profile):
        with pytest.raises(InvalidImageError, match="can't be read"):
            decode_image(data)


SCRIPT = """
import base64
from deployments.generator.images import decode_image
from serve_app.config import LimitsConfig
from serve_app.images.images import read_image
decode_image(read_image(input(), LimitsConfig(), "p").data)
"""


@pytest.mark.slow
def test_broken_metadata_writes_nothing_into_the_log() -> None:
    fields = b"".join(struct.pack("<HHII", tag, 7, 10**6, 0) for tag in range(300, 4300))
    exif = b"Exif\0\0" + struct.pack("<2sHIH", b"II", 42, 8, 4000) + fields
    data = saved(Image.new("RGB", (9, 5)), "JPEG", exif=exif)
    jfif = data.index(b"\xff\xe0")
    without_density = data[:jfif] + data[jfif + 18 :]
    uri = f"data:image/jpeg;base64,{b64encode(without_density).decode()}"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=uri, text=True, capture_output=True, check=True
    )
    assert done.stderr == ""
