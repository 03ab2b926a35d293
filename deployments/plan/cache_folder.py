"""Where files lie that may be made again at any time: compiled kernels, and times of starts.

A file of weights that are out of memory (`UnnamedFile`) lies there, too, and has no name, so it
ends with its process, however that ends.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final
from weakref import finalize

MAX_CALL_BYTES: Final = 2**30
"""The most bytes that one call of the system moves; it takes less than 2 GiB."""

MOUNTS: Final = Path("/proc/self/mountinfo")
"""The file systems that this process sees.

Source: https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
"""

IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
"""File systems whose files take as much memory as they give back."""

Transfer = Callable[[int, memoryview, int], int]
"""Reads or writes at a place in a file; returns the bytes that it has transferred."""


def cache_folder() -> Path:
    """Return the folder of what may be made again at any time; it may not exist.

    Source: https://specifications.freedesktop.org/basedir-spec/latest/ (XDG_CACHE_HOME)

    Raises:
        RuntimeError: The user has no home.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return cache / "raystream"


class UnnamedFile:
    """A file without a name on the disk of the cache folder."""

    def __init__(self, num_bytes: int) -> None:
        """Take room on the disk.

        Args:
            num_bytes: As many as are written; may be 0.

        Raises:
            OSError: The disk has no room, or the folder is in memory.
            RuntimeError: The user has no home.
        """
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_in_memory(folder):
            raise OSError(
                f"files of {folder} lie in memory, so they would save none; let XDG_CACHE_HOME "
                "name a folder on a disk"
            )
        self._file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - it stays open
        self.close = finalize(self, self._file.close)
        try:
            if num_bytes:  # the system refuses to take room for nothing
                # A disk that is too small says so before anything is written.
                os.posix_fallocate(self.fileno(), 0, num_bytes)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._file.fileno()

    def write(self, parts: Iterable[memoryview]) -> None:
        """Write all parts, one after the other; the next one is asked for when one is written.

        Raises:
            OSError: They can't be written; the file is closed.
        """
        try:
            self._transfer(os.pwrite, parts)
        except BaseException:
            self.close()
            raise

    def read(self, parts: Iterable[memoryview]) -> None:
        """Fill all parts in the order in which they were written; see `write`.

        Raises:
            OSError: The file can't be read, or has ended.
        """
        self._transfer(_read, parts)

    def _transfer(self, move: Transfer, parts: Iterable[memoryview]) -> None:
        offset = 0
        for part in parts:
            left = part
            while left:
                moved = move(self.fileno(), left[:MAX_CALL_BYTES], offset)
                if not moved:
                    raise OSError("the file of the weights has ended too early")
                left, offset = left[moved:], offset + moved


def _read(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Read from a place in a file into a buffer."""
    return os.preadv(descriptor, [buffer], offset)


def is_in_memory(folder: Path) -> bool:
    """Return whether files of a folder lie in memory; False where the system does not say."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return False
    for mount in mounts:
        where, _, what = mount.partition(" - ")
        if where.split(" ")[2:3] == [number]:
            return what.split(" ")[0] in IN_MEMORY
    return False
