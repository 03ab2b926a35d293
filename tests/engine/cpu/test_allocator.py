import ctypes
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from deployments.engine.cpu.allocator import keep_freed_memory

NUM_BYTES = 200 * 2**20

FREES_MUCH = f"""
import sys
from pathlib import Path
from deployments.engine.cpu.allocator import keep_freed_memory

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = resident_bytes()
block = bytearray(b"x" * {NUM_BYTES})
del block
print(resident_bytes() - before)
"""
"""The settings hold for a whole process, so they are tried in one of its own."""


def bytes_kept(how: str) -> int:
    ran = subprocess.run(
        [sys.executable, "-c", FREES_MUCH, how], capture_output=True, text=True, check=True
    )
    return int(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_kept_and_was_not_before() -> None:
    assert bytes_kept("as it is") < NUM_BYTES / 10
    assert bytes_kept("keep") > NUM_BYTES


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.delattr(ctypes, "CDLL")
    assert not keep_freed_memory()


@pytest.mark.parametrize("refused", [-1, -3, -8])
def test_a_setting_that_is_refused_is_told(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    glibc = SimpleNamespace(mallopt=lambda parameter, _: int(parameter != refused))
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: glibc)
    assert not keep_freed_memory()
