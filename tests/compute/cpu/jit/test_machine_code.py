import ctypes
from pathlib import Path

import llvmlite
import pytest

from deployments.compute.cpu.jit import machine_code
from deployments.compute.cpu.jit.machine_code import MachineCode
from deployments.compute.kept_files import KERNELS
from deployments.plan.processor import features

NAME = "add"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return KERNELS.folder


def adding(number: int) -> str:
    """Return a function that adds a number."""
    return f"define i64 @{NAME}(i64 %x) {{\n %y = add i64 %x, {number}\n ret i64 %y\n}}"


def never(number: int) -> str:
    raise AssertionError("a stored kernel is not emitted")


def call(code: MachineCode, argument: int) -> int:
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    result = kind(code.address_of(NAME))(argument)
    assert isinstance(result, int)
    return result


def num_files(folder: Path) -> int:
    return len(list(folder.iterdir()))


@pytest.mark.parametrize("optimize", [True, False])
def test_a_stored_kernel_computes_as_the_compiled_one(folder: Path, optimize: bool) -> None:
    for _ in range(2):
        assert call(MachineCode(adding(3), optimize=optimize), 4) == 7
        assert num_files(folder) == 1


def test_a_stored_kernel_is_not_emitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    MachineCode.emitted(adding, 3, optimize=False)
    monkeypatch.setattr(never, "__qualname__", adding.__qualname__)
    assert call(MachineCode.emitted(never, 3, optimize=False), 4) == 7
    with pytest.raises(AssertionError, match="not emitted"):
        MachineCode.emitted(never, 5, optimize=False)


def test_each_thing_that_changes_a_kernel_gives_it_a_file_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MachineCode.emitted(adding, 3, optimize=False)
    MachineCode.emitted(adding, 4, optimize=False)
    MachineCode.emitted(adding, 4, optimize=True)
    assert num_files(folder) == 3
    with monkeypatch.context() as patch:
        patch.setattr(machine_code, "source_digest", lambda: "other source")
        MachineCode.emitted(adding, 4, optimize=True)
    assert num_files(folder) == 4
    with monkeypatch.context() as patch:
        patch.setattr(llvmlite, "__version__", "0")
        MachineCode.emitted(adding, 4, optimize=True)
    assert num_files(folder) == 5
    with monkeypatch.context() as patch:
        fewer = {**features(), "sse3": False}
        patch.setattr(machine_code, "features", lambda: fewer)
        MachineCode.emitted(adding, 4, optimize=True)
    assert num_files(folder) == 6


def test_without_a_folder_kernels_are_compiled(folder: Path) -> None:
    folder.parent.write_text("a file where the folder would be")
    assert call(MachineCode(adding(3), optimize=True), 4) == 7
