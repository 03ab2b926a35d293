"""A model's weights on the disk while nobody uses them, so that their memory can be given back.

Compiled kernels and captured programs hold addresses of weights. So a model that is not used keeps
its tensors, and only their pages are given back. Before the first time, the weights are written as
they lie in memory, packed for the kernels, to a file without a name, which ends with the process.
Until other programs need the memory, the system keeps the file there.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Final
from weakref import finalize

import torch

from deployments.compute.host_memory import give_back_pages
from deployments.plan.cache_folder import cache_folder

MIN_BYTES: Final = 2**16
"""Smaller tensors stay: they hold few whole pages, and all of them are little beside the rest."""

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


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """The memory of one weight.

    Attributes:
        address: Of its first byte.
        num_bytes: Its length.
    """

    address: int
    num_bytes: int

    @property
    def content(self) -> memoryview:
        """The weight's bytes, to read and to write."""
        return memoryview((ctypes.c_char * self.num_bytes).from_address(self.address)).cast("B")


class StoredWeights:
    """The weights of a model on the CPU, which are in memory or on the disk."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Leave the weights where they are.

        Args:
            model: Its weights are packed, and lie in no mapped file (`pack_weights`).
        """
        self._model = model
        self._weights: tuple[WeightMemory, ...] = ()
        self._file: IO[bytes] | None = None
        self.is_given_back = False

    def give_back(self) -> None:
        """Give the weights' memory back to the system; they are on the disk then.

        Raises:
            OSError: They can't be written; nothing was given back.
            RuntimeError: The user has no home to write them to.
        """
        if self._file is None:
            weights = weight_memory(self._model)
            self._file, self._weights = _written(weights), weights
            finalize(self, self._file.close)
        for each in self._weights:
            give_back_pages(each.address, each.num_bytes)
        self.is_given_back = True

    def fill(self) -> None:
        """Read the weights into their memory again; do nothing if they are there.

        Raises:
            OSError: They can't be read; the model must not be used any more.
        """
        if self.is_given_back:
            assert self._file is not None, "what was given back was written before"
            _transfer(_read, self._file, self._weights)
            self.is_given_back = False


def weight_memory(model: torch.nn.Module) -> tuple[WeightMemory, ...]:
    """Return the memory of all weights of a model that are worth giving back, each once."""
    found: dict[int, WeightMemory] = {}
    for tensor in _tensors(model):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            memory = WeightMemory(storage.data_ptr(), storage.nbytes())
        else:  # packed by oneDNN
            ops = torch.ops.mkldnn
            memory = WeightMemory(ops.data_ptr(tensor), ops._nbytes(tensor))
        if memory.num_bytes >= MIN_BYTES:
            found.setdefault(memory.address, memory)
    return tuple(found.values())


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        held = {**vars(module), **module._parameters, **module._buffers}
        yield from (value for value in held.values() if isinstance(value, torch.Tensor))


def _written(weights: tuple[WeightMemory, ...]) -> IO[bytes]:
    """Return a new file that has the weights, one after the other.

    Raises:
        OSError: They can't be written, or the folder is in memory.
    """
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_in_memory(folder):
        raise OSError(
            f"files of {folder} lie in memory, so they would save none; let XDG_CACHE_HOME name a "
            "folder on a disk"
        )
    file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - it stays open
    try:
        # A disk that is too small says so before anything is written.
        os.posix_fallocate(file.fileno(), 0, sum(each.num_bytes for each in weights))
        _transfer(os.pwrite, file, weights)
    except BaseException:
        file.close()
        raise
    return file


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


def _read(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Read from a place in a file into a buffer."""
    return os.preadv(descriptor, [buffer], offset)


def _transfer(move: Transfer, file: IO[bytes], weights: tuple[WeightMemory, ...]) -> None:
    """Write all weights to a file, or read them from it.

    Raises:
        OSError: The file can't be written or read, or it has ended.
    """
    offset = 0
    for each in weights:
        left = each.content
        while left:
            moved = move(file.fileno(), left[:MAX_CALL_BYTES], offset)
            if not moved:
                raise OSError("the file of the weights has ended too early")
            left, offset = left[moved:], offset + moved
