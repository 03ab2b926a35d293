import os
import stat
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

from deployments.compute.kept_files import KERNELS

KEY, OBJECT = b"a kernel", b"machine code"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return KERNELS.folder


@pytest.fixture
def stored(folder: Path) -> Path:
    """Return the file of a kernel."""
    KERNELS.write(KEY, OBJECT)
    (path,) = folder.iterdir()
    return path


def test_a_kernel_is_read_under_its_key_only(stored: Path) -> None:
    assert (KERNELS.read(KEY), KERNELS.read(b"another")) == (OBJECT, None)


def test_folder_and_file_are_closed_to_others(folder: Path, stored: Path) -> None:
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, stored)]
    assert modes == [0o700, 0o600]


def chmod_file(path: Path) -> None:
    path.chmod(0o620)


def chmod_folder(path: Path) -> None:
    path.parent.chmod(0o770)


def link_file(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def link_folder(path: Path) -> None:
    path.parent.rename(path.parent.parent / "elsewhere")
    path.parent.symlink_to(path.parent.parent / "elsewhere")


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10])


@pytest.mark.parametrize(
    "spoil",
    [chmod_file, chmod_folder, link_file, link_folder, put_pipe, damage, cut_off],
)
def test_what_others_could_have_written_or_is_damaged_is_passed_over(
    stored: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(stored)
    assert KERNELS.read(KEY) is None
    assert "compiled again" in caplog.text


def test_what_another_user_owns_is_passed_over(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert KERNELS.read(KEY) is None
    KERNELS.write(b"another", OBJECT)
    assert list(stored.parent.iterdir()) == [stored]


def test_a_folder_that_is_open_to_others_is_not_written(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    KERNELS.write(KEY, OBJECT)
    assert list(folder.iterdir()) == []


def test_a_damaged_kernel_is_replaced(stored: Path) -> None:
    damage(stored)
    KERNELS.write(KEY, OBJECT)
    assert KERNELS.read(KEY) == OBJECT


def test_a_write_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", fail)
    KERNELS.write(KEY, OBJECT)
    assert list(folder.iterdir()) == []


def test_a_folder_that_can_not_be_made_stops_nothing(folder: Path) -> None:
    folder.parent.write_text("a file where the folder would be")
    KERNELS.write(KEY, OBJECT)
    assert KERNELS.read(KEY) is None


def write_often(content: bytes) -> None:
    for _ in range(100):
        KERNELS.write(KEY, content)


def test_processes_that_write_at_once_leave_one_whole_kernel(folder: Path) -> None:
    contents = [bytes([number]) * 10_000 for number in range(3)]
    KERNELS.write(KEY, contents[0])
    with get_context("spawn").Pool(2) as pool:
        writing = pool.map_async(write_often, contents[1:])
        while not writing.ready():
            assert KERNELS.read(KEY) in contents
        writing.get()
    assert len(list(folder.iterdir())) == 1
