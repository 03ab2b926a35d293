"""The images that go along with questions, as `data:` URIs."""

import base64
from pathlib import Path
from typing import Final

MEDIA_TYPES: Final = {
    ".gif": "image/gif",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
}


class ImagesError(ValueError):
    """A directory holds no images."""


def read_images(directory: Path) -> tuple[str, ...]:
    """Return a directory's images in the order of their names, each as a URI.

    All are read before the load begins: reading one meanwhile would be a lag of the tool's own.

    Raises:
        ImagesError: There are none.
        OSError: One can't be read.
    """
    if not directory.is_dir():
        raise ImagesError(f"{directory} is no directory")
    paths = sorted(path for path in directory.iterdir() if path.suffix.lower() in MEDIA_TYPES)
    if not paths:
        raise ImagesError(f"{directory} holds none of {', '.join(sorted(MEDIA_TYPES))}")
    return tuple(_data_uri(path) for path in paths)


def _data_uri(path: Path) -> str:
    encoded = base64.b64encode(path.read_bytes()).decode("ascii")
    return f"data:{MEDIA_TYPES[path.suffix.lower()]};base64,{encoded}"
