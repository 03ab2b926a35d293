"""The images that go along with questions, as `data:` URIs."""

import base64
from functools import lru_cache
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


def find_images(directory: Path) -> tuple[Path, ...]:
    """Return a directory's images in the order of their names.

    Raises:
        ImagesError: There are none.
    """
    if not directory.is_dir():
        raise ImagesError(f"{directory} is no directory")
    found = sorted(path for path in directory.iterdir() if path.suffix.lower() in MEDIA_TYPES)
    if not found:
        raise ImagesError(f"{directory} holds none of {', '.join(sorted(MEDIA_TYPES))}")
    return tuple(found)


@lru_cache(maxsize=256)
def data_uri(path: Path) -> str:
    """Return an image as a URI."""
    encoded = base64.b64encode(path.read_bytes()).decode("ascii")
    return f"data:{MEDIA_TYPES[path.suffix.lower()]};base64,{encoded}"
