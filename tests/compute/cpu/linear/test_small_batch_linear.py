from collections.abc import Mapping

import llvmlite.binding as llvm
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from deployments.compute.cpu.jit.openmp import find_parallel
from deployments.compute.cpu.linear import small_batch_linear
from deployments.compute.cpu.linear.packed_layout import BLOCK, can_read
from deployments.compute.cpu.linear.prepacked_linear import PrepackedLinear, can_prepack
from deployments.compute.cpu.linear.small_batch_kernel import emit_kernel, make_kernel
from deployments.compute.cpu.linear.small_batch_linear import (
    MAX_PART_BYTES,
    SmallBatchLinear,
    use_small_batch_linear,
)
from deployments.compute.cpu.linear.tiling import (
    AVX2,
    AVX512,
    AVX512_BF16,
    GROUP_ROWS,
    Arithmetic,
    Tiling,
    find_arithmetic,
)
from deployments.plan.processor import features
from tests.compute.cpu.linear.linears import Product

DTYPES = [
    dtype
    for dtype in (torch.float32, torch.bfloat16)
    if find_arithmetic(features(), is_bfloat16=dtype is torch.bfloat16) and can_prepack(dtype)
]
"""The dtypes for which this processor has a kernel."""

needs_kernel = pytest.mark.skipif(
    find_parallel() is None or not DTYPES,
    reason="needs a processor with AVX2, and torch on libgomp",
)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> SmallBatchLinear:
    kernel = make_kernel(is_bfloat16=weight.dtype is torch.bfloat16)
    assert kernel is not None
    packed = PrepackedLinear(weight, bias).packed
    assert can_read(packed)
    return SmallBatchLinear(kernel, packed, bias)


@needs_kernel
def test_every_number_of_rows_gives_the_product(dtype: torch.dtype) -> None:
    weight, bias = random(320, 96, dtype=dtype), random(320, dtype=dtype, seed=1)
    rows, layer = random(333, 96, dtype=dtype, seed=2), layer_of(weight, bias)
    product, offenders = Product(rows, weight, bias), []
    for num_rows in (*range(1, GROUP_ROWS + 12), 200, 333):
        found = layer(rows[None, :num_rows])
        if found.shape != (1, num_rows, 320) or not product.is_close(found):
            offenders.append(num_rows)
    assert offenders == []


def part_inputs(dtype: torch.dtype) -> int:
    """Return the most inputs that are computed in one part."""
    return MAX_PART_BYTES // 64 // dtype.itemsize


@needs_kernel
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 64), (64, 4096), (896, 896)])
def test_every_size_of_a_layer_gives_the_product(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    weight, rows = random(outputs, inputs, dtype=dtype), random(200, inputs, dtype=dtype)
    layer, product = layer_of(weight), Product(rows, weight)
    counts = (1, 13, 127, 130, 200)
    assert [n for n in counts if not product.is_close(layer(rows[:n]))] == []


@needs_kernel
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("num_parts", "rest"), [(1, 0), (2, 32), (3, -32)])
def test_a_layer_in_parts_gives_the_product(num_parts: int, rest: int, dtype: torch.dtype) -> None:
    inputs = (num_parts - (rest > 0)) * part_inputs(dtype) + rest
    weight, bias = random(128, inputs, dtype=dtype), random(128, dtype=dtype, seed=1)
    layer, rows = layer_of(weight, bias), random(191, inputs, dtype=dtype, seed=2)
    assert layer._num_parts == num_parts
    product, offenders = Product(rows, weight, bias), []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_rows in (1, 7, 13, 64, 127, 128, 191):
            found, last = layer(rows[:num_rows]), rows[num_rows - 1 : num_rows]
            if not product.is_close(found) or not torch.equal(found[-1:], layer(last)):
                offenders.append((num_threads, num_rows))
    assert offenders == []


@needs_kernel
def test_parts_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = random(128, 2048, dtype=dtype), random(33, 2048, dtype=dtype, seed=1)
    whole = layer_of(weight)
    monkeypatch.setattr(small_batch_linear, "MAX_PART_BYTES", 2048 * 64 * dtype.itemsize // 5)
    divided = layer_of(weight)
    assert (whole._num_parts, divided._num_parts) == (1, 6)
    assert torch.equal(whole(rows), divided(rows))


@needs_kernel
@pytest.mark.usefixtures("threads")
def test_any_number_of_threads_gives_the_same(dtype: torch.dtype) -> None:
    layer, rows = layer_of(random(1024, 64, dtype=dtype)), random(20, 64, dtype=dtype, seed=1)
    torch.set_num_threads(1)
    expected = layer(rows)
    for num_threads in (2, 5):
        torch.set_num_threads(num_threads)
        assert torch.equal(layer(rows), expected), num_threads


@needs_kernel
@pytest.mark.usefixtures("threads")
def test_a_rows_result_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    layer = layer_of(random(256, 64, dtype=dtype), random(256, dtype=dtype, seed=1))
    rows = random(420, 64, dtype=dtype, seed=2)
    torch.set_num_threads(1)
    alone = torch.cat([layer(row[None]) for row in rows])
    offenders = []
    for num_threads in (1, 2, 9):
        torch.set_num_threads(num_threads)
        for num_rows in (*range(1, 100, 7), 2 * GROUP_ROWS - 1, 2 * GROUP_ROWS, 331, 420):
            if not torch.equal(layer(rows[:num_rows]), alone[:num_rows]):
                offenders.append((num_threads, num_rows))
    assert offenders == []


@needs_kernel
def test_nothing_is_written_outside_the_output(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, rows = layer_of(random(64, 64, dtype=dtype)), random(7, 64, dtype=dtype, seed=1)
    frame = torch.full((3, 7, 64), 7.0, dtype=dtype)
    monkeypatch.setattr(small_batch_linear, "empty", lambda *_: frame[1])
    assert torch.equal(layer(rows), frame[1])
    assert torch.all(frame[[0, 2]] == 7)


@needs_kernel
def test_rows_with_gaps_and_no_rows_are_accepted(dtype: torch.dtype) -> None:
    layer, rows = layer_of(random(128, 64, dtype=dtype)), random(6, 128, dtype=dtype, seed=1)
    assert torch.equal(layer(rows[::2, :64]), layer(rows[::2, :64].contiguous()))
    assert layer(rows[:0, :64]).shape == (0, 128)


@needs_kernel
def test_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    layer, rows = layer_of(random(128, 64, dtype=dtype)), random(5, 64, dtype=dtype, seed=1)
    expected = layer(rows)
    rows[2, 3] = torch.nan
    found = layer(rows)
    assert torch.all(found[2].isnan())
    assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@needs_kernel
@pytest.mark.parametrize(("outputs", "inputs"), [(100, 64), (128, 72)], ids=str)
def test_unsupported_sizes_are_left_alone(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    assert not can_read(PrepackedLinear(random(outputs, inputs, dtype=dtype), None).packed)


@needs_kernel
def test_a_layer_in_another_layout_is_left_alone(dtype: torch.dtype) -> None:
    """OneDNN packs 192 outputs of float32 in narrower blocks on AVX2; the others as expected."""
    rows, left_alone, offenders = random(3, 64, dtype=dtype, seed=1), [], []
    for outputs in range(64, 1600, 64):
        weight = random(outputs, 64, dtype=dtype)
        if not can_read(PrepackedLinear(weight, None).packed):
            left_alone.append(outputs)
        elif not Product(rows, weight).is_close(layer_of(weight)(rows)):
            offenders.append(outputs)
    assert (left_alone in ([], [192]), offenders) == (True, [])


@needs_kernel
def test_weights_that_lie_elsewhere_are_left_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = PrepackedLinear(random(128, 64, dtype=dtype), None).packed
    other = random(2, 64 // (4 // dtype.itemsize), 64, 4 // dtype.itemsize, dtype=dtype, seed=1)
    address = torch.ops.mkldnn.data_ptr
    assert can_read(packed)
    monkeypatch.setattr(torch.ops.mkldnn, "data_ptr", lambda _: other.data_ptr())
    assert not can_read(packed)
    monkeypatch.setattr(torch.ops.mkldnn, "data_ptr", address)
    assert can_read(packed)


@needs_kernel
def test_a_traced_graph_gets_the_kernel(dtype: torch.dtype) -> None:
    module = torch.nn.Sequential(
        PrepackedLinear(random(128, 64, dtype=dtype), random(128, dtype=dtype, seed=1)),
        PrepackedLinear(random(100, 128, dtype=dtype), None),
    )
    rows = random(1, 3, 64, dtype=dtype, seed=2)
    graph = make_fx(module, tracing_mode="symbolic", _allow_non_fake_inputs=True)(rows)
    expected = graph(rows)
    use_small_batch_linear(graph)
    assert [type(child) for child in graph.children()] == [SmallBatchLinear]
    torch.testing.assert_close(graph(rows).float(), expected.float(), rtol=0.02, atol=0.1)


@pytest.mark.skipif(not can_prepack(torch.float32), reason="no layer would be prepacked here")
def test_a_processor_without_the_kernel_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(small_batch_linear, "find_parallel", lambda: "an entry")
    monkeypatch.setattr(small_batch_linear, "make_kernel", lambda *, is_bfloat16: None)
    small_batch_linear._kernel_of.cache_clear()
    layers = [PrepackedLinear(random(64, 64, dtype=torch.float32), None) for _ in range(2)]
    module = torch.nn.Sequential(*layers)
    rows = random(1, 3, 64, dtype=torch.float32)
    graph = make_fx(module, tracing_mode="symbolic", _allow_non_fake_inputs=True)(rows)
    for _ in range(2):
        use_small_batch_linear(graph)
    small_batch_linear._kernel_of.cache_clear()
    assert not list(graph.children())
    (message,) = [r.message for r in caplog.records if r.name == small_batch_linear.__name__]
    assert "call by call" in message
    assert "torch.float32" in message
    assert "AVX2" in message


@pytest.mark.parametrize(
    ("features", "in_float32", "in_bfloat16"),
    [
        ({}, None, None),
        ({"avx2": True}, None, None),
        ({"avx2": True, "fma": True}, AVX2, None),
        ({"avx2": True, "fma": True, "avx512f": True}, AVX512, None),
        ({"avx512f": True, "avx512bf16": True}, AVX512, AVX512_BF16),
        ({"avx512f": True, "avx512bf16": True, "amx-bf16": True}, AVX512, None),
        ({"neon": True, "bf16": True}, None, None),
    ],
    ids=str,
)
def test_each_processor_multiplies_in_the_widest_way_it_has(
    features: Mapping[str, bool], in_float32: Arithmetic | None, in_bfloat16: Arithmetic | None
) -> None:
    assert find_arithmetic(features, is_bfloat16=False) is in_float32
    assert find_arithmetic(features, is_bfloat16=True) is in_bfloat16


@pytest.mark.parametrize(
    ("arithmetic", "processor", "instruction", "register"),
    [
        (AVX2, "haswell", "vfmadd231ps", "ymm"),
        (AVX512, "skylake-avx512", "vfmadd231ps", "zmm"),
        (AVX512_BF16, "cooperlake", "vdpbf16ps", "zmm"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tiles_sums_stay_in_registers(
    arithmetic: Arithmetic, processor: str, instruction: str, register: str
) -> None:
    """LLVM compiles for a processor that this one need not be."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    module = llvm.parse_assembly(emit_kernel(arithmetic))
    module.verify()
    assembly = target.create_target_machine(cpu=processor, opt=3).emit_assembly(module)
    for num_rows in (GROUP_ROWS, arithmetic.max_wide_rows):
        tiling = Tiling.of(num_rows, arithmetic)
        assert tiling.is_wide == (num_rows == arithmetic.max_wide_rows)
        name = tiling.name(is_last=True, unpacks=False)
        body = assembly.partition(f"\n{name}:")[2].partition(".cfi_endproc")[0]
        lines = [line for line in body.splitlines() if instruction in line]
        num_vectors = BLOCK // arithmetic.lanes if tiling.is_wide else 2
        assert len(lines) == 4 * num_vectors * tiling.tile_rows  # words, vectors, rows
        assert all(register in line for line in lines)
        # A spilled vector lies on the stack.
        assert not any("rsp" in line and register in line for line in body.splitlines())
