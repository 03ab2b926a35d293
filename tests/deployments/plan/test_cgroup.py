from pathlib import Path

import pytest

from deployments.plan.cgroup import ContainerMemory, free_bytes, memory, num_cores, total_bytes


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """Return the cgroup of a pod with 1000 bytes and one and a half cores."""
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 250\nactive_file 50\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    return tmp_path


def test_memory_below_the_limit_that_is_not_in_use_is_free(container: Path) -> None:
    assert free_bytes(container) == 1000 - (700 - 250)
    assert memory(container) == ContainerMemory(1000, 700 - 250)
    assert num_cores(container) == 1.5


def test_the_whole_is_the_container_s_limit_or_the_machine_s_memory(container: Path) -> None:
    assert total_bytes(container) == 1000
    (container / "memory.max").write_text("max\n")
    machine = total_bytes(container)
    assert machine > 2**30
    (container / "memory.max").write_text(f"{2 * machine}\n")
    assert total_bytes(container) == machine


def test_nothing_is_free_beyond_the_limit(container: Path) -> None:
    (container / "memory.current").write_text("1900\n")
    assert free_bytes(container) == 0


def test_no_limit_is_none(container: Path) -> None:
    (container / "memory.max").write_text("max\n")
    (container / "cpu.max").write_text("max 100000\n")
    assert free_bytes(container) is None
    assert memory(container) is None
    assert num_cores(container) is None


def test_without_a_cgroup_there_is_no_limit(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) is None
    assert num_cores(tmp_path) is None
