"""Copies numbers between the host and the model's device without waiting for the device.

A copy from pageable memory blocks the host until the GPU has finished all earlier work, so the host
can't prepare the next step meanwhile. A copy from pinned memory is queued on the device. torch
reuses a pinned block only after the copy from it is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def host_tensor(
    values: Sequence[float] | Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return a host tensor that can be copied to the device without waiting."""
    is_pinned = device.type == "cuda" and len(values) > 0
    return torch.tensor(values, dtype=dtype, pin_memory=is_pinned)


def to_device(
    values: Sequence[float] | Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return the values as a tensor on the device."""
    return host_tensor(values, device, dtype).to(device, non_blocking=True)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor's values on the device."""
    return pin(tensor, device).to(device, non_blocking=True)


def pin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor from which values can be copied to the device without waiting."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


@dataclass(frozen=True, slots=True)
class Fetched:
    """A tensor that is on its way to the host.

    Attributes:
        tensor: On the host; what it holds is right only after `wait`.
        copied: Happens once it is there; None if it is.
    """

    tensor: torch.Tensor
    copied: torch.cuda.Event | None

    def wait(self) -> torch.Tensor:
        """Return the tensor once it is there. What was launched later is not waited for."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.tensor


def fetch(tensor: torch.Tensor) -> Fetched:
    """Begin to copy a tensor to the host."""
    if tensor.device.type != "cuda":
        return Fetched(tensor.cpu(), None)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it untyped
    fetched = Fetched(tensor.to("cpu", non_blocking=True), copied)
    # By default it is recorded on the stream of the current device, which may be another one.
    copied.record(torch.cuda.current_stream(tensor.device))
    return fetched


def wait_for(device: torch.device) -> None:
    """Return once a GPU has done all work that was launched, on whatever stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return a copy of some rows of [n, ...]; indexing with a list would wait for the device."""
    return tensor.index_select(0, to_device(rows, tensor.device, torch.int64))
