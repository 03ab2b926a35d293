"""The GPU's attention of decode rows against masked attention.

Without a GPU it runs in Triton's interpreter, if Triton is installed and TRITON_INTERPRET=1; there
only with float16, since the interpreter multiplies no matrices of bfloat16.
"""

import os

import pytest
import torch

from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.attention.varlen_reads import TOLERANCE, compare_rows_with_masks

HAS_GPU = torch.cuda.is_available()
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (HAS_GPU or IS_INTERPRETED), reason="there is no GPU"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16 if HAS_GPU else torch.float16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(14, 2, 64), (28, 4, 128), (16, 8, 256), (12, 12, 64), (4, 1, 8), (24, 1, 80), (8, 4, 96)],
)
def test_rows_attend_as_with_masks_whole_and_in_parts(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deployments.compute.gpu import row_attention

    if not HAS_GPU:
        monkeypatch.setattr(row_attention, "_num_parts", lambda _, number, *__: 1 + (number < 99))
        monkeypatch.setattr("deployments.engine.attention.varlen_reads.PROBE_REPEATS", (1, 30))
    shape = KVShape((None,), num_kv_heads, head_dim, dtype)
    error = compare_rows_with_masks(row_attention.attend_rows, shape, num_heads, DEVICE)
    assert error <= TOLERANCE[dtype]


def test_few_extents_are_read_in_parts_and_many_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.compute.gpu.row_attention import MAX_PARTS, _num_parts

    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    numbers = [_num_parts(DEVICE, extents, 2**15, 64) for extents in (1, 32, 128, 10_000)]
    assert numbers[0] == MAX_PARTS
    assert numbers[-1] == 1
    assert numbers == sorted(numbers, reverse=True)
    assert _num_parts(DEVICE, 1, 130, 64) == 3  # no part is empty
