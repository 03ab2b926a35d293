"""Images as they come in a request: `data:` URIs, checked before anyone decodes them.

Refuses every other URI: a server that fetches what a client names can be turned against its own
network. Reads an image's header alone, and never repeats what the decoder says of it.
"""

import base64
import binascii
import re
from io import BytesIO

from PIL import Image, UnidentifiedImageError

from deployments.contract import ImagePart
from deployments.errors import InvalidImageError

_DATA_URI = re.compile(r"data:([^;,]*);base64,", re.IGNORECASE)
_FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",  # no registered name, but often written
    "image/webp": "WEBP",
    "image/gif": "GIF",
}


def read_image(uri: str, max_pixels: int, param: str) -> ImagePart:
    """Return the encoded image in a `data:` URI.

    Args:
        uri: `data:image/png;base64,...`, or jpeg, webp or gif.
        max_pixels: The largest image that is let through.
        param: Where in the request it stands, for the error.

    Raises:
        InvalidImageError: It is no such URI, no such image, or too large.
    """
    header = _DATA_URI.match(uri, 0, 64)
    if header is None:
        raise InvalidImageError(
            "Images come as base64 data: URIs, 'data:image/png;base64,...'; "
            "other URLs are not fetched.",
            param,
        )
    image_format = _FORMATS.get(header[1].lower())
    if image_format is None:
        raise InvalidImageError(f"An image's type must be one of {', '.join(_FORMATS)}.", param)
    data = _decode_base64(uri[header.end() :], param)
    _check_pixels(data, image_format, max_pixels, param)
    return ImagePart(data)


def _decode_base64(text: str, param: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidImageError("The image's base64 is broken.", param) from None


def _check_pixels(data: bytes, image_format: str, max_pixels: int, param: str) -> None:
    too_large = InvalidImageError(f"The image has more than {max_pixels} pixels.", param)
    try:
        with Image.open(BytesIO(data), formats=(image_format,)) as image:
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise too_large from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, OverflowError):
        raise InvalidImageError(f"The image can't be read as {image_format}.", param) from None
    if width * height > max_pixels:
        raise too_large
