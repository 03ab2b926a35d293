"""Where a model's weights lie, whose memory can be given back and filled again.

Compiled kernels and captured programs hold addresses of weights. So a model that is not used keeps
its tensors, and only their pages are given back. Another copy of the model, loaded from the same
files in the same way, fills them again.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from deployments.compute.host_memory import give_back_pages

MIN_BYTES: Final = 2**16
"""Smaller tensors stay: they hold few whole pages, and all of them are little beside the rest."""


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """The memory of one weight.

    Attributes:
        name: The weight's, in its model.
        address: Of its first byte.
        num_bytes: Its length.
    """

    name: str
    address: int
    num_bytes: int

    def give_back(self) -> None:
        """Give its pages back to the system; the weight is lost."""
        give_back_pages(self.address, self.num_bytes)

    def fill(self, other: "WeightMemory") -> None:
        """Take the weight from another copy of the model, whose memory is given back."""
        self._bytes().copy_(other._bytes())
        other.give_back()

    def _bytes(self) -> torch.Tensor:
        memory = (ctypes.c_char * self.num_bytes).from_address(self.address)
        return torch.frombuffer(memory, dtype=torch.uint8)


def weight_memory(model: torch.nn.Module) -> tuple[WeightMemory, ...]:
    """Return the memory of all weights that are worth giving back, each once, in a fixed order.

    Args:
        model: On the CPU; its weights are packed, and lie in no mapped file (`pack_weights`).
    """
    found: dict[int, WeightMemory] = {}
    for name, tensor in _tensors(model):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            address, num_bytes = storage.data_ptr(), storage.nbytes()
        else:  # packed by oneDNN
            address = torch.ops.mkldnn.data_ptr(tensor)
            num_bytes = torch.ops.mkldnn._nbytes(tensor)
        if num_bytes >= MIN_BYTES:
            found.setdefault(address, WeightMemory(name, address, num_bytes))
    return tuple(found.values())


def fill_weights(held: tuple[WeightMemory, ...], other: torch.nn.Module) -> None:
    """Fill memory that was given back from another copy of the model.

    Takes no more memory than this copy and one weight: what was copied is given back.

    Args:
        held: The memory of the model.
        other: The copy, which must not be used afterwards.

    Raises:
        ValueError: The copy has other weights; nothing was filled.
    """
    pairs = list(zip(held, weight_memory(other), strict=True))
    for one, fresh in pairs:
        if (one.name, one.num_bytes) != (fresh.name, fresh.num_bytes):
            raise ValueError(
                f"{fresh.name} has {fresh.num_bytes} bytes where {one.name} had {one.num_bytes}"
            )
    for one, fresh in pairs:
        one.fill(fresh)


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        held = {**vars(module), **module._parameters, **module._buffers}
        for name, value in held.items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}", value
