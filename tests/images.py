"""Images as clients send them."""

from base64 import b64encode
from io import BytesIO

from PIL.Image import Image


def png(image: Image) -> bytes:
    """Return an image as a PNG file."""
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_uri(image: Image) -> str:
    return f"data:image/png;base64,{b64encode(png(image)).decode()}"
