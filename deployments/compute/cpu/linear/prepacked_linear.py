"""Linear layers whose weights are stored in the layout that oneDNN's kernels read.

Plain weights are reordered in every call, which takes half the time of a decode step. The operators
are the ones that torch's compiler emits. They are private, so `can_prepack` tries them before they
are used.

Source: torch/_inductor/fx_passes/mkldnn_fusion.py, `linear_dynamic_fp16` and its neighbours.
"""

import logging
from functools import cache
from typing import Any

import torch
from torch.nn.functional import linear

from deployments.compute.cpu.linear.packed_linear import PackedLinear
from deployments.compute.host_memory import use_huge_pages_for

logger = logging.getLogger(__name__)

BATCH_HINT = 16
"""Number of rows that the layout is chosen for. One layout is enough: the layouts for 1 to 512 rows
were equally fast with 1 to 512 rows."""

PREPACKED_DTYPES = (torch.float32, torch.bfloat16)


class PrepackedLinear(PackedLinear):
    """A linear layer on reordered weights.

    Attributes:
        packed: The reordered weights, [out_features, in_features] in oneDNN's layout.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Reorder a copy of the weights.

        Args:
            weight: [out_features, in_features], float32 or bfloat16, on the CPU.
            bias: [out_features], or None.
        """
        super().__init__(weight, bias)
        self.dtype = weight.dtype
        self.num_bytes = sum(t.nbytes for t in (weight, bias) if t is not None)
        # Not a buffer: an opaque layout can be neither saved nor moved.
        self.packed = _ops()._reorder_linear_weight(weight.detach().contiguous(), BATCH_HINT)
        use_huge_pages_for(self.packed)
        self._bias = None if bias is None else bias.detach().clone()

    @staticmethod
    def fits(linear: torch.nn.Linear) -> bool:
        """Return whether its weights can be reordered on this machine."""
        return can_prepack(linear.weight.dtype)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the layer to [..., in_features]."""
        output = _ops()._linear_pointwise(rows, self.packed, self._bias, "none", [], "")
        assert isinstance(output, torch.Tensor)
        return output


@cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Return whether the operators exist, run on this CPU and agree with `linear`.

    torch refuses to pack bfloat16 on CPUs with neither AVX512BW nor AVX-NE-CONVERT; such layers are
    not replaced. The result is cached, so the reason is logged once per dtype.
    """
    if dtype not in PREPACKED_DTYPES:
        return False
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 32), (48, 32), (48,))
    )
    try:
        found = PrepackedLinear(weight, bias)(rows)
        if not torch.allclose(found, linear(rows, weight, bias), rtol=2e-2, atol=2e-2):
            raise RuntimeError("the operators give other values")
    except (AttributeError, RuntimeError) as error:
        summary = str(error).strip().partition("\n")[0]
        logger.warning("linear layers of %s are not prepacked, and slower: %s", dtype, summary)
        return False
    return True


def _ops() -> Any:
    return torch.ops.mkldnn
