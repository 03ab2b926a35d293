import ctypes
import mmap
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deployments.compute.cpu.linear.packed_linear import PackedLinear
from deployments.compute.cpu.linear.prepacked_linear import PrepackedLinear, can_prepack
from deployments.compute.cpu.linear.quantized_linear import Int8Linear, quantization_obstacle
from deployments.compute.host_memory import ReservedMemory, keep_freed_memory, use_huge_pages

NUM_BYTES = 200 * 2**20
HUGE = 2**21
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")

FREES_MUCH = f"""
import sys
from pathlib import Path
from deployments.compute.host_memory import keep_freed_memory

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = resident_bytes()
block = bytearray(b"x" * {NUM_BYTES})
del block
print(resident_bytes() - before)
"""
"""The settings hold for a whole process, so a subprocess tries them."""


def bytes_kept(how: str) -> int:
    ran = subprocess.run(
        [sys.executable, "-c", FREES_MUCH, how], capture_output=True, text=True, check=True
    )
    return int(ran.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_kept_and_is_not_by_default() -> None:
    assert bytes_kept("as it is") < NUM_BYTES / 10
    assert bytes_kept("keep") > NUM_BYTES


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.delattr(ctypes, "CDLL")
    assert not keep_freed_memory()


@pytest.mark.parametrize("refused", [-1, -3, -8])
def test_a_refused_setting_is_reported(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    glibc = SimpleNamespace(mallopt=lambda parameter, _: int(parameter != refused))
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: glibc)
    assert not keep_freed_memory()


def huge_bytes(address: int) -> int:
    """Return the bytes on huge pages in the mapping of an address, from /proc/self/smaps."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *_ = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            is_there = start <= address < end
        elif is_there and first == "AnonHugePages:":
            return 1024 * int(line.split()[1])
    return 0


def skip_unless_there_are_some() -> None:
    with mmap.mmap(-1, 4 * HUGE, flags=mmap.MAP_PRIVATE) as mapping:
        values = torch.frombuffer(mapping, dtype=torch.int64)
        values.fill_(1)
        is_moved = use_huge_pages(values.data_ptr(), values.nbytes)
        del values
    if not is_moved:
        pytest.skip("the kernel has no huge pages to give, or is older than 6.1")


needs_huge_pages = pytest.mark.skipif(
    not SWITCH.exists() or "[never]" in SWITCH.read_text(),
    reason="needs Linux with transparent huge pages",
)


@needs_huge_pages
def test_memory_in_use_moves_onto_huge_pages_and_keeps_its_values() -> None:
    skip_unless_there_are_some()
    with mmap.mmap(-1, 4 * HUGE, flags=mmap.MAP_PRIVATE) as mapping:
        values = torch.frombuffer(mapping, dtype=torch.int64)
        values.copy_(torch.arange(len(values)))
        assert use_huge_pages(values.data_ptr(), values.nbytes)
        assert huge_bytes(values.data_ptr() + HUGE) >= 3 * HUGE
        assert torch.equal(values, torch.arange(len(values)))
        del values


@needs_huge_pages
@pytest.mark.parametrize(
    ("layer", "obstacle"),
    [
        (Int8Linear, quantization_obstacle()),
        (PrepackedLinear, None if can_prepack(torch.float32) else "this build can't prepack"),
    ],
)
def test_a_layers_weights_lie_on_huge_pages(
    layer: type[PackedLinear], obstacle: str | None
) -> None:
    if obstacle is not None:
        pytest.skip(obstacle)
    skip_unless_there_are_some()
    made = layer(torch.ones(2048, 4096), None)
    if isinstance(made, Int8Linear):
        address = made._integers.data_ptr()
    else:
        assert isinstance(made, PrepackedLinear)
        address = torch.ops.mkldnn.data_ptr(made.packed)
    assert huge_bytes(address + HUGE) >= HUGE


def test_less_than_a_page_is_left_alone() -> None:
    values = torch.zeros(16)
    assert not use_huge_pages(values.data_ptr(), values.nbytes)


PAGE = mmap.PAGESIZE

linux_only = pytest.mark.skipif(
    platform.system() != "Linux", reason="other systems take pages only when they need them"
)


@linux_only
def test_reserved_memory_takes_pages_as_they_are_written_and_gives_them_back() -> None:
    code = f"""
from pathlib import Path
import torch
from deployments.compute.host_memory import ReservedMemory

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * {PAGE}

size = ({NUM_BYTES} // 4, 4)
reserved = ReservedMemory(2 * ReservedMemory.size_of(size, torch.int8))
told = [resident_bytes()]
first, second = (reserved.zeros(size, torch.int8) for _ in range(2))
for change in (lambda: None, lambda: first.fill_(1), lambda: reserved.give_back(first)):
    change()
    told.append(resident_bytes())
print(*(after - told[0] for after in told[1:]), int(first.any()), int(second.any()))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    made, written, given_back, *contents = map(int, ran.stdout.split())
    assert made < NUM_BYTES / 10
    assert NUM_BYTES <= written < 1.1 * NUM_BYTES
    assert given_back < NUM_BYTES / 10
    assert contents == [0, 0]


@linux_only
def test_only_whole_pages_of_a_part_are_given_back() -> None:
    size = (4 * PAGE,)
    reserved = ReservedMemory(ReservedMemory.size_of(size, torch.uint8))
    tensor = reserved.zeros(size, torch.uint8).fill_(7)
    reserved.give_back(tensor[PAGE - 1 : PAGE + 1])
    reserved.give_back(tensor[3 * PAGE + 1 :])
    assert tensor.eq(7).all()
    reserved.give_back(tensor[1 : 3 * PAGE - 1])
    assert tensor.nonzero().flatten().tolist() == [*range(PAGE), *range(2 * PAGE, 4 * PAGE)]


def test_each_tensor_of_reserved_memory_has_pages_of_its_own() -> None:
    sizes = [(3, 5), (1,), (PAGE,)]
    reserved = ReservedMemory(sum(ReservedMemory.size_of(size, torch.bfloat16) for size in sizes))
    tensors = [reserved.zeros(size, torch.bfloat16) for size in sizes]
    assert all(tensor.data_ptr() % PAGE == 0 for tensor in tensors)
    for i, tensor in enumerate(tensors):
        tensor.fill_(i + 1)
    assert [set(tensor.flatten().tolist()) for tensor in tensors] == [{1.0}, {2.0}, {3.0}]


def test_memory_that_can_t_be_reserved_is_an_error_for_want_of_memory() -> None:
    with pytest.raises(MemoryError, match=r"4611686018427387904 bytes can't be reserved"):
        ReservedMemory(2**62)
