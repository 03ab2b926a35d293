"""Copies numbers from the host to the model's device without waiting for the device.

A copy from pageable memory blocks the host until the GPU has finished all earlier work, so the host
can't prepare the next step meanwhile. A copy from pinned memory is queued on the device. torch
reuses a pinned block only after the copy from it is done.
"""

from collections.abc import Sequence

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
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def take_rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return a copy of some rows of [n, ...]; indexing with a list would wait for the device."""
    return tensor.index_select(0, to_device(rows, tensor.device, torch.int64))
