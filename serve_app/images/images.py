"""Images in a request, checked before any code decodes them.

Images come as `data:` URIs, or were fetched by `fetcher`. Only an image's header is read here, and
error messages never repeat the decoder's own.
"""

import base64
import binascii
import re

from PIL import Image, UnidentifiedImageError

from deployments.contract import ImagePart
from deployments.errors import InvalidImageError
from serve_app.config import LimitsConfig
from serve_app.images.file_structure import CrowdedImageError, open_header

_DATA_URI = re.compile(r"data:([^;,]*);base64,", re.IGNORECASE)
_FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",  # not registered, but common
    "image/webp": "WEBP",
    "image/gif": "GIF",
}


_ANY_FORMAT = tuple(sorted(set(_FORMATS.values())))

# Guards any code in this process that opens an image without the check below.
Image.MAX_IMAGE_PIXELS = 64 * 2**20


def is_data_uri(uri: str) -> bool:
    """Return whether the URI itself holds the image."""
    return uri[:5].lower() == "data:"


def read_image(uri: str, limits: LimitsConfig, param: str) -> ImagePart:
    """Return the encoded image in a `data:` URI.

    Args:
        uri: `data:image/png;base64,...`, or jpeg, webp or gif.
        limits: The most bytes and pixels.
        param: The image's place in the request, for error messages.

    Raises:
        InvalidImageError: The URI or the image is malformed, of another type, or too large.
    """
    header = _DATA_URI.match(uri, 0, 64)
    if header is None:
        raise InvalidImageError(
            "Send images as base64 data: URIs, 'data:image/png;base64,...'.", param
        )
    image_format = _FORMATS.get(header[1].lower())
    if image_format is None:
        raise InvalidImageError(f"An image's type must be one of {', '.join(_FORMATS)}.", param)
    # Four characters hold three bytes; padding takes the place of at most two.
    _check_bytes((len(uri) - header.end()) * 3 // 4 - 2, limits, param)
    data = _decode_base64(uri[header.end() :], param)
    return check_image(data, (image_format,), limits, param)


def check_image(
    data: bytes, formats: tuple[str, ...] | None, limits: LimitsConfig, param: str
) -> ImagePart:
    """Return an encoded image after checking its size and its header against the limits.

    Args:
        data: The file.
        formats: The allowed formats; None allows every format that is read here.
        limits: The most bytes and pixels.
        param: The image's place in the request, for error messages.

    Raises:
        InvalidImageError: The image is malformed, of another format, or too large.
    """
    _check_bytes(len(data), limits, param)
    _check_pixels(data, formats or _ANY_FORMAT, limits.max_image_pixels, param)
    return ImagePart(data)


def _check_bytes(num_bytes: int, limits: LimitsConfig, param: str) -> None:
    if num_bytes > limits.max_image_bytes:
        raise InvalidImageError(
            f"The image has more than {limits.max_image_bytes} bytes (limits.max_image_bytes).",
            param,
        )


def _decode_base64(text: str, param: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidImageError("The image's base64 is malformed.", param) from None


def _check_pixels(data: bytes, formats: tuple[str, ...], max_pixels: int, param: str) -> None:
    too_large = InvalidImageError(
        f"The image has more than {max_pixels} pixels (limits.max_image_pixels).", param
    )
    try:
        with Image.open(open_header(data), formats=formats) as image:
            width, height = image.size
    except CrowdedImageError:
        raise InvalidImageError(
            "The image's file has too many parts. Save it again without its metadata.", param
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise too_large from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, OverflowError):
        raise InvalidImageError(
            f"The image can't be read as {' or '.join(formats)}.", param
        ) from None
    if width * height > max_pixels:
        raise too_large
