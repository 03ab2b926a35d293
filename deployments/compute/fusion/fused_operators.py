"""The operators that `fuse` puts in place of chains; `cpu` and `gpu` each implement them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class FusedOperators:
    """Fused operators of one kind of device; `cpu.fusion.ops` documents their arguments.

    Attributes:
        device_type: The device.
        max_width: Rows that a norm takes are shorter.
        rms_norm: Takes rows, weight, epsilon, and whether the weight is 1 + weight.
        add_rms_norm: Takes rows, others, and then as `rms_norm`; returns the sum and its norm.
        rotate: Takes heads, cosines and sines.
        silu_mul: Takes the gate and the factor, joined.
        gelu_mul: As `silu_mul`; also bfloat16 if there is no `table_mul`.
        table_mul: Takes a table of an activation for all bfloat16, and then as `silu_mul`.
        all_bfloat16: Returns the table's arguments.
        rotate_pair: Takes heads, other heads, cosines and sines; returns both as `rotate` would.
    """

    device_type: str
    max_width: int
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rotate: Callable[..., torch.Tensor]
    silu_mul: Callable[..., torch.Tensor]
    gelu_mul: Callable[..., torch.Tensor]
    table_mul: Callable[..., torch.Tensor] | None = None
    all_bfloat16: Callable[[], torch.Tensor] | None = None
    rotate_pair: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
