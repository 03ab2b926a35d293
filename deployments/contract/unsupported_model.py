"""The error for a model that can't be served, and why a file of it can't be read, in one line."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

MAX_REASON_CHARS: Final = 1000
"""The longest reason that is told in full; a model whose files are wrong may have a line for each
of a thousand weights.
"""

WITH_SENTENCES: Final = (OSError, ValueError, RuntimeError, ImportError)
"""Errors whose messages are sentences. That of a KeyError is only the key."""

CUDA_ERROR: Final = "CUDA error: "
"""How an error of CUDA begins, to which torch adds lines of advice for its own developers."""

LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"
"""How the file begins that git leaves in place of a large one.

Source: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
"""


class UnsupportedModelError(ValueError):
    """The model can't be served; the message names the feature or file at fault."""


def reason_of(error: BaseException) -> str:
    """Return the whole message of an error in one line, with its class where the message needs it.

    A message of more than `MAX_REASON_CHARS` is cut, and ends in an ellipsis.
    """
    text = str(error).strip()
    text = text.partition("\n")[0] if text.startswith(CUDA_ERROR) else " ".join(text.split())
    if not text:
        return type(error).__name__
    if not isinstance(error, WITH_SENTENCES):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS].rstrip()}..."


def pointers_in(files: Iterable[Path]) -> list[str]:
    """Return the names of the files that are only git-lfs pointers."""
    return sorted(file.name for file in files if file.is_file() and _is_pointer(file))


def pointer_advice(names: Iterable[str]) -> str:
    """Return what to do about files that are only git-lfs pointers."""
    return (
        f"only git-lfs pointers lie in the folder in place of {', '.join(names)}; run "
        "`git lfs pull` there, or download the model again"
    )


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(LFS_POINTER)) == LFS_POINTER
