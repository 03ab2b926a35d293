"""The GPU's attention of decode rows against masked attention."""

import pytest
import torch

from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.attention.varlen_reads import TOLERANCE, compare_rows_with_masks
from tests.compute.gpu.gpu_or_interpreter import DEVICE, HAS_GPU, MATRIX_DTYPE, needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(14, 2, 64), (28, 4, 128), (16, 8, 256), (12, 12, 64), (4, 1, 8), (24, 1, 80), (8, 4, 96)],
)
def test_rows_attend_as_with_masks_whole_and_in_parts(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deployments.compute.gpu import row_attention

    if not HAS_GPU:
        monkeypatch.setattr(row_attention, "_num_parts", lambda _, number, *__: 1 + (number < 99))
        monkeypatch.setattr("deployments.engine.attention.varlen_reads.PROBE_REPEATS", (1, 30))
    shape = KVShape((None,), num_kv_heads, head_dim, MATRIX_DTYPE)
    error = compare_rows_with_masks(row_attention.attend_rows, shape, num_heads, DEVICE)
    assert error <= TOLERANCE[MATRIX_DTYPE]


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


def test_an_extent_may_hold_more_elements_than_32_bits_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deployments.compute.gpu import row_attention

    monkeypatch.setattr(row_attention, "_num_parts", lambda *_: 2)
    num_tokens, stride = 131, 2**24
    # A CPU takes no memory that is never touched; a GPU takes 9 GB for this.
    memory = torch.empty(2 * num_tokens * stride, dtype=MATRIX_DTYPE, device=DEVICE)
    keys, values = (
        half.view(num_tokens, 1, stride)[..., :16] for half in memory.view(2, num_tokens, stride)
    )
    generator = torch.Generator().manual_seed(0)
    for stored in (keys, values):
        stored.copy_(torch.randn(num_tokens, 1, 16, generator=generator).to(MATRIX_DTYPE))
    query = torch.randn(1, 3, 16, generator=generator).to(DEVICE, MATRIX_DTYPE)
    start, length = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (1, 130))
    found = row_attention.attend_rows(query, keys, values, start, length, 130, None)
    own_keys, own_values = (stored[1:, 0].float() for stored in (keys, values))
    weights = (query[0].float() @ own_keys.t() * 16**-0.5).softmax(-1)
    torch.testing.assert_close(found[0].float(), weights @ own_values, rtol=0.02, atol=0.02)
