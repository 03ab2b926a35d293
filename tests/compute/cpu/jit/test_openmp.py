"""Which OpenMP library compiled kernels enter parallel regions through."""

import ctypes
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deployments.compute.cpu.jit import openmp

MAPPED = "7f00-7f01 r-xp 00000000 00:1f 42   "


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    for found in (openmp.find_parallel, openmp.find_barrier, openmp._find_library):
        found.cache_clear()
    yield
    for found in (openmp.find_parallel, openmp.find_barrier, openmp._find_library):
        found.cache_clear()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let torch ship no library; return the file that tells those that are loaded."""
    package, maps = tmp_path / "torch", tmp_path / "maps"
    (package / "lib").mkdir(parents=True)
    (package / "lib" / "libtorch_cpu.so").touch()
    monkeypatch.setattr(torch, "__file__", str(package / "__init__.py"))
    monkeypatch.setattr(openmp, "MAPS", maps)
    return maps


class Library:
    """Has the entries; remembers its path."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.GOMP_parallel = ctypes.CFUNCTYPE(None)()
        self.GOMP_barrier = ctypes.CFUNCTYPE(None)()


class LibraryWithoutEntries:
    def __init__(self, path: str) -> None: ...


@pytest.mark.parametrize("name", ["libgomp.so.1", "libomp.so", "libiomp5.so", "libgomp-98b2.so.1"])
def test_the_library_that_is_loaded_is_used_if_torch_ships_none(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = f"/opt/conda/lib/{name}"
    elsewhere.write_text(
        f"{MAPPED}{path}\n{MAPPED}{path}\n{MAPPED}/lib/libc.so.6\n7f00-7f01 rw-p\n"
    )
    monkeypatch.setattr(ctypes, "CDLL", Library)
    library = openmp._find_library()
    assert isinstance(library, Library)
    assert library.path == path
    assert openmp.find_parallel() is not None


@pytest.mark.parametrize(
    ("text", "library", "told"),
    [
        (None, Library, "none"),
        ("", Library, "none"),
        (f"{MAPPED}/lib/libcomposite.so\n", Library, "none"),
        (f"{MAPPED}/a/libgomp.so.1\n{MAPPED}/b/libomp.so\n", Library, "libgomp.so.1"),
        (f"{MAPPED}/a/libomp.so\n", LibraryWithoutEntries, "libomp.so"),
    ],
)
def test_without_one_library_with_entries_the_log_says_so_once(
    elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    text: str | None,
    library: type,
    told: str,
) -> None:
    if text is not None:
        elsewhere.write_text(text)
    monkeypatch.setattr(ctypes, "CDLL", library)
    caplog.set_level(logging.WARNING)
    assert openmp.find_parallel() is None
    assert openmp.find_barrier() is None
    (record,) = caplog.records
    assert "compiled kernels run on one thread" in record.message
    assert told in record.message
