import subprocess
import sys
import venv
from pathlib import Path

import pytest

from serve_app.commands.install import InstallationError, PipProgress, has_pip, run_pip

ROOT = Path(__file__).resolve().parents[3]
OUTPUT = """\
WARNING: Location 'file:///a/simple/ray/' is ignored: it is neither a file nor a directory.
Collecting ray==2.60.0 (from -r requirements.lock (line 2))
  Downloading ray-2.60.0-cp311-cp311-manylinux2014_x86_64.whl.metadata (21 kB)
Collecting torch==2.13.0 (from -r requirements.lock (line 3))
  Downloading https://files.example/torch-2.13.0-cp311-cp311-linux_x86_64.whl (190.5 MB)
  Downloading numpy-2.4.0-cp311-cp311-linux_x86_64.whl (16.9 MB)
Installing collected packages: ray, torch, numpy
Successfully installed numpy-2.4.0 ray-2.60.0 torch-2.13.0
"""


def progress(environment: Path, since_s: float = 0) -> PipProgress:
    return PipProgress(environment, since_s)


def fake_pip(output: str, code: int = 0) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.stdout.write({output!r}); sys.exit({code})"]


def test_only_large_downloads_are_told_of_all_that_pip_writes(tmp_path: Path) -> None:
    told: list[str] = []
    run_pip(fake_pip(OUTPUT), progress(tmp_path), tmp_path / "log", told.append)
    assert told == ["downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl, 190.5 MB"]
    assert (tmp_path / "log").read_text() == OUTPUT


def test_an_installation_that_fails_shows_its_whole_output(tmp_path: Path) -> None:
    with pytest.raises(InstallationError) as raised:
        run_pip(fake_pip(OUTPUT, 1), progress(tmp_path), tmp_path / "log", lambda line: None)
    assert str(raised.value) == OUTPUT


def test_a_status_counts_the_packages_found_and_then_those_unpacked(tmp_path: Path) -> None:
    counted = progress(tmp_path)
    lines = OUTPUT.splitlines(keepends=True)
    for line in lines[:6]:
        counted.read(line)
    assert counted.status() == "2 packages found"
    counted.read(lines[6])
    assert counted.status() == "0 of 3 packages unpacked"
    (tmp_path / "lib/python3.11/site-packages/ray-2.60.0.dist-info").mkdir(parents=True)
    assert counted.status() == "1 of 3 packages unpacked"


def test_packages_of_an_earlier_installation_are_not_counted(tmp_path: Path) -> None:
    folder = tmp_path / "lib/python3.11/site-packages/pip-26.0.dist-info"
    folder.mkdir(parents=True)
    counted = progress(tmp_path, since_s=folder.stat().st_mtime + 1)
    counted.read("Installing collected packages: ray\n")
    assert counted.status() == "0 of 1 packages unpacked"


def test_a_long_silence_of_pip_is_filled_with_the_status(tmp_path: Path) -> None:
    """Pip ends only when its status has been told."""
    told: list[str] = []
    release = tmp_path / "release"
    command = [sys.executable, "-c", f"import os\nwhile not os.path.exists({str(release)!r}): pass"]

    def tell(line: str) -> None:
        told.append(line)
        release.touch()

    run_pip(command, progress(tmp_path), tmp_path / "log", tell, heartbeat_s=0.01)
    assert set(told) == {"0 packages found"}


def test_an_environment_whose_making_was_interrupted_is_made_again(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    assert not has_pip(python)
    venv.create(tmp_path, with_pip=False)
    assert not has_pip(python)
    assert has_pip(Path(sys.executable))


def test_an_interruption_stops_pip_and_leaves_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('Collecting ray', flush=True)\nwhile True: pass"]
    log = tmp_path / "log"

    def interrupt(line: str) -> None:
        if "1 packages" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_pip(command, progress(tmp_path), log, interrupt, heartbeat_s=0.01)
    assert log.read_text() == "Collecting ray\n"


def test_the_installer_needs_no_package() -> None:
    """The Makefile runs it with an interpreter that has none."""
    subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport serve_app.commands.install",
        ],
        check=True,
    )
