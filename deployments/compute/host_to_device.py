"""Numbers from the host to the model's device, without waiting for it.

A copy from ordinary memory waits until the GPU has done all that was asked of it before, and the
host can't prepare what comes next. From pinned memory the copy takes its turn on the device. torch
hands a pinned block out again only after the copy from it is done.
"""

from collections.abc import Sequence

import torch


def host_tensor(
    values: Sequence[float] | Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor on the host from which a copy to the device waits for nothing."""
    is_pinned = device.type == "cuda" and len(values) > 0
    return torch.tensor(values, dtype=dtype, pin_memory=is_pinned)


def to_device(
    values: Sequence[float] | Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return the values as a tensor on the device."""
    return host_tensor(values, device, dtype).to(device, non_blocking=True)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on the device."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def take_rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows of a tensor [n, ...], as a copy; a list as an index would make it wait."""
    return tensor.index_select(0, to_device(rows, tensor.device, torch.int64))
