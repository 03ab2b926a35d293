import mmap
from pathlib import Path

import pytest
import torch

from deployments.engine.cpu.huge_pages import use_huge_pages

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


@pytest.mark.skipif(
    not SWITCH.exists() or "[never]" in SWITCH.read_text(),
    reason="needs Linux with transparent huge pages",
)
def test_memory_in_use_moves_onto_huge_pages_and_keeps_its_values() -> None:
    with mmap.mmap(-1, 4 * HUGE, flags=mmap.MAP_PRIVATE) as mapping:
        values = torch.frombuffer(mapping, dtype=torch.int64)
        values.copy_(torch.arange(len(values)))
        if not use_huge_pages(values.data_ptr(), values.nbytes):
            pytest.skip("the kernel has no huge pages to give, or is older than 6.1")
        assert huge_bytes(values.data_ptr() + HUGE) >= 3 * HUGE
        assert torch.equal(values, torch.arange(len(values)))
        del values


def test_less_than_a_page_is_left_alone() -> None:
    values = torch.zeros(16)
    assert not use_huge_pages(values.data_ptr(), values.nbytes)
