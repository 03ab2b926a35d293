"""A model's weights on the disk while nobody uses them, so that their memory can be given back.

Compiled kernels and captured programs hold addresses of weights. So a model that is not used keeps
its tensors, and only their pages are given back. Before the first time, the weights are written as
they lie in memory, packed for the kernels, to a file without a name, which ends with the process.
Until other programs need the memory, the system keeps the file there.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from deployments.compute.host_memory import give_back_pages
from deployments.plan.cache_folder import UnnamedFile

MIN_BYTES: Final = 2**16
"""Smaller tensors stay: they hold few whole pages, and all of them are little beside the rest."""


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
    """The weights of a model on the CPU, which are in memory or on the disk.

    Attributes:
        level: Where they are while the model sleeps: 2, in a file.
        keeps_addresses: Whether what holds addresses of weights stays valid.
        is_given_back: Whether they are not in memory.
    """

    level = 2
    keeps_addresses = True

    def __init__(self, model: torch.nn.Module) -> None:
        """Leave the weights where they are.

        Args:
            model: Its weights are packed, and lie in no mapped file (`pack_weights`).
        """
        self._model = model
        self._weights: tuple[WeightMemory, ...] = ()
        self._file: UnnamedFile | None = None
        self.is_given_back = False

    def give_back(self) -> None:
        """Give the weights' memory back to the system; they are on the disk then.

        Raises:
            OSError: They can't be written; nothing was given back.
            RuntimeError: The user has no home to write them to.
        """
        if self._file is None:
            weights = weight_memory(self._model)
            file = UnnamedFile(sum(each.num_bytes for each in weights))
            file.write(each.content for each in weights)
            self._file, self._weights = file, weights
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
            self._file.read(each.content for each in self._weights)
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
