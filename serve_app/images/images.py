"""Images in a request, checked before any code decodes them.

Images come as `data:` URIs, or were fetched by `fetcher`. Only an image's header is read here, and
error messages never repeat the decoder's own.
"""

import base64
import re
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from PIL import Image, UnidentifiedImageError

from deployments.contract.errors import InvalidImageError
from deployments.contract.messages import IMAGE_FORMATS, ImagePart
from serve_app.config import LimitsConfig
from serve_app.images.file_structure import CrowdedImageError, open_header

_DATA_URI: Final = re.compile(r"data:[^,]*; *base64 *,", re.IGNORECASE)
_MAX_HEADER_LENGTH: Final = 1024

_WHITESPACE: Final = b" \t\r\n\f"
_STANDARD: Final = bytes.maketrans(b"-_", b"+/")
"""From base64's alphabet for URLs to the standard one."""

_SIGNATURES: Final[Mapping[str, re.Pattern[bytes]]] = MappingProxyType(
    {
        "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
        "image/jpeg": re.compile(rb"\xff\xd8\xff"),
        "image/webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
        "image/gif": re.compile(rb"GIF8[79]a"),
    }
)
"""How files begin. Source: https://mimesniff.spec.whatwg.org/#matching-an-image-type-pattern"""

# Guards any code in this process that opens an image without the check below.
Image.MAX_IMAGE_PIXELS = 64 * 2**20

# A file with broken metadata makes Pillow warn once for each broken field, up to thousands of them.
warnings.filterwarnings("ignore", module=r"PIL\.")


def is_data_uri(uri: str) -> bool:
    """Return whether the URI itself holds the image."""
    return uri[:5].lower() == "data:"


def read_image(uri: str, limits: LimitsConfig, param: str) -> ImagePart:
    """Return the encoded image in a `data:` URI.

    Args:
        uri: `data:image/png;base64,...`. The bytes decide what it is, not the type that it names.
            As in browsers, the base64 may be broken into lines and lack its padding; it may also
            be base64 for URLs.
        limits: The most bytes and pixels.
        param: The image's place in the request, for error messages.

    Raises:
        InvalidImageError: The URI or the image is malformed, of another format, or too large.
    """
    header = _DATA_URI.match(uri, 0, _MAX_HEADER_LENGTH)
    if header is None:
        raise InvalidImageError(
            "Send images as base64 data: URIs, 'data:image/png;base64,...'.", param
        )
    return check_image(_decode_base64(uri[header.end() :], limits, param), limits, param)


def check_image(data: bytes, limits: LimitsConfig, param: str) -> ImagePart:
    """Return an encoded image after checking its size and its header against the limits.

    Args:
        data: The file.
        limits: The most bytes and pixels.
        param: The image's place in the request, for error messages.

    Raises:
        InvalidImageError: The image is malformed, of another format, or too large.
    """
    _check_bytes(len(data), limits, param)
    _check_pixels(data, limits.max_image_pixels, param)
    return ImagePart(data)


def media_type_of(encoded: str) -> str | None:
    """Return the type of the image in base64, by its first bytes; None if it is no image."""
    try:
        start = _standard_base64(encoded[:64])
        data = base64.b64decode(start[: len(start) // 4 * 4])
    except ValueError:
        return None
    return next((name for name, begins in _SIGNATURES.items() if begins.match(data)), None)


def _check_bytes(num_bytes: int, limits: LimitsConfig, param: str) -> None:
    if num_bytes > limits.max_image_bytes:
        raise InvalidImageError(
            f"The image has more than {limits.max_image_bytes} bytes (limits.max_image_bytes).",
            param,
        )


def _decode_base64(text: str, limits: LimitsConfig, param: str) -> bytes:
    try:
        encoded = _standard_base64(text)
        _check_bytes(len(encoded) * 3 // 4, limits, param)
        return base64.b64decode(encoded + b"=" * (-len(encoded) % 4), validate=True)
    except ValueError:
        raise InvalidImageError("The image's base64 is malformed.", param) from None


def _standard_base64(text: str) -> bytes:
    """Return base64 in the standard alphabet, without whitespace and padding.

    Source: https://infra.spec.whatwg.org/#forgiving-base64-decode
    """
    return text.encode("ascii").translate(_STANDARD, _WHITESPACE).rstrip(b"=")


def _check_pixels(data: bytes, max_pixels: int, param: str) -> None:
    too_large = InvalidImageError(
        f"The image has more than {max_pixels} pixels (limits.max_image_pixels).", param
    )
    try:
        with Image.open(open_header(data), formats=IMAGE_FORMATS) as image:
            width, height = image.size
    except CrowdedImageError:
        raise InvalidImageError(
            "The image's file has too many parts. Save it again without its metadata.", param
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise too_large from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, OverflowError):
        raise InvalidImageError(
            "The image can't be read. Send a PNG, JPEG, WebP or GIF.", param
        ) from None
    if width * height > max_pixels:
        raise too_large
