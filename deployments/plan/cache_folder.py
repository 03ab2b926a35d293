"""Where files lie that may be made again at any time: compiled kernels, and times of starts."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of what may be made again at any time; it may not exist.

    Source: https://specifications.freedesktop.org/basedir-spec/latest/ (XDG_CACHE_HOME)

    Raises:
        RuntimeError: The user has no home.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return cache / "raystream"
