import mmap
from pathlib import Path

import pytest
import torch

from deployments.engine.cpu.huge_pages import use_huge_pages
from deployments.engine.cpu.int8_linear import Int8Linear, int8_obstacle
from deployments.engine.cpu.prepacked_linear import PrepackedLinear, can_prepack
from deployments.engine.cpu.shared_input import Layer

HUGE = 2**21
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(address: int) -> int:
    """Return the bytes on huge pages in the mapping that holds an address, by /proc's smaps."""
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
        (Int8Linear, int8_obstacle()),
        (PrepackedLinear, None if can_prepack(torch.float32) else "this build can't prepack"),
    ],
)
def test_a_layers_weights_lie_on_huge_pages(layer: Layer, obstacle: str | None) -> None:
    if obstacle is not None:
        pytest.skip(obstacle)
    skip_unless_there_are_some()
    made = layer(torch.ones(2048, 4096), None)
    assert huge_bytes(torch.ops.mkldnn.data_ptr(made._packed) + HUGE) >= HUGE


def test_less_than_a_page_is_left_alone() -> None:
    values = torch.zeros(16)
    assert not use_huge_pages(values.data_ptr(), values.nbytes)
