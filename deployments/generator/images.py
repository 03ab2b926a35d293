"""Decodes an image file into the picture that a person sees: upright, on white, 8 bits a sample.

Viewers turn a photograph by its EXIF orientation and show a page behind what is transparent. Pillow
leaves both to its callers, and its conversion to RGB drops alpha and cuts samples of 16 bits off at
255. Colour profiles are not applied: the models' own training did not apply them either.

Only four decoders may open a file, whatever the ingress lets through.
"""

import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from types import MappingProxyType
from typing import Final

import numpy as np
from PIL import ExifTags, Image, ImageFile

from deployments.contract.errors import InvalidImageError
from deployments.contract.messages import IMAGE_FORMATS

MAX_IMAGE_PIXELS: Final = 2**26
"""Larger images are never decoded, whatever the ingress lets through."""

_BACKGROUND: Final = "white"

_TURNS: Final[Mapping[object, Image.Transpose]] = MappingProxyType(
    {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
)
"""What makes a picture upright, by its EXIF orientation. Source: Exif 3.0, 4.6.5.1.6."""

_GRAY_STEPS: Final[Mapping[str, int]] = MappingProxyType({"L;2": 85, "L;4": 17})
"""What Pillow multiplies the samples of a PNG with 2 and 4 bits by, to fill 8 bits."""

# A file with broken metadata makes Pillow warn once for each broken field, up to thousands of them.
warnings.filterwarnings("ignore", module=r"PIL\.")


def decode_image(data: bytes) -> Image.Image:
    """Decode an image; of an animation, its first frame.

    Returns:
        The picture as a person sees it: mode "RGB", turned by its orientation, on white. Samples of
        16 bits keep their upper 8.

    Raises:
        InvalidImageError: The image can't be decoded; the message does not repeat the decoder's.
    """
    with _reading(data) as image:
        return _upright(_on_white(image), image)


def image_size(data: bytes) -> tuple[int, int]:
    """Return an image's height and width as its file has them; no pixel is decoded.

    Raises:
        InvalidImageError: See `decode_image`.
    """
    with _reading(data) as image:
        return image.height, image.width


@contextmanager
def _reading(data: bytes) -> Iterator[ImageFile.ImageFile]:
    """Open an image; what fails while it is read becomes `InvalidImageError`."""
    try:
        image = Image.open(BytesIO(data), formats=IMAGE_FORMATS)
        if image.width * image.height > MAX_IMAGE_PIXELS:
            raise InvalidImageError(f"an image has more than {MAX_IMAGE_PIXELS} pixels")
        yield image
    except InvalidImageError:
        raise
    except Exception as error:  # Pillow's decoders raise anything for broken files
        raise InvalidImageError("an image can't be read; send PNG, JPEG, WebP or GIF") from error


def _on_white(image: ImageFile.ImageFile) -> Image.Image:
    """Return an image in RGB, with white behind what it leaves transparent or does not cover."""
    # Loading the samples forgets how and where the file holds them.
    tile = image.tile[0] if image.tile else None
    image.load()
    seen = _in_eight_bits(image, tile[3] if tile else None)
    if seen.has_transparency_data:
        seen = seen.convert("RGBA")
        page = Image.new("RGB", seen.size, _BACKGROUND)
        page.paste(seen, mask=seen)
        return page
    seen = seen.convert("RGB")
    covered = tile[1] if tile else None
    if covered in (None, (0, 0, *seen.size)):
        return seen
    # The frame of a GIF may be smaller than its canvas.
    page = Image.new("RGB", seen.size, _BACKGROUND)
    page.paste(seen.crop(covered), covered)
    return page


def _in_eight_bits(image: Image.Image, layout: object) -> Image.Image:
    """Return an image with samples of 8 bits, and its transparent colour in 8 bits, too.

    Args:
        image: As loaded. Its transparent colour may still be as the file has it.
        layout: Pillow's name for how the file holds the samples.
    """
    clear = image.info.pop("transparency", None)
    if image.mode.startswith("I"):
        samples = np.asarray(image)
        gray = Image.fromarray((samples >> 8).astype(np.uint8))
        if isinstance(clear, int):
            gray.putalpha(Image.fromarray((samples != clear).astype(np.uint8) * np.uint8(255)))
        return gray
    if layout in _GRAY_STEPS and isinstance(clear, int):
        step = _GRAY_STEPS[str(layout)]
        clear = clear % (256 // step) * step
    elif layout == "RGB;16B" and isinstance(clear, tuple):
        clear = tuple(sample >> 8 for sample in clear)
    # A PNG's text may bear this name, too.
    if isinstance(clear, int | bytes | tuple):
        image.info["transparency"] = clear
    return image


def _upright(picture: Image.Image, file: Image.Image) -> Image.Image:
    """Return a picture turned by its file's orientation; broken metadata has none."""
    try:
        turn = _TURNS.get(file.getexif().get(ExifTags.Base.Orientation))
    except (SyntaxError, TypeError, ValueError, struct.error):
        return picture
    return picture if turn is None else picture.transpose(turn)
