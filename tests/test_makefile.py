"""What each target installs, and that other programs run what its targets run."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PIP = "-m pip --disable-pip-version-check --no-input"
SERVING = f"{PIP} install --constraint requirements.lock --editable ."
ALL = f"{PIP} install --requirement requirements.lock"
RAN = '#!/bin/sh\n[ "$1" = -c ] || echo "$*" >> {log}\n'
"""A program that does nothing and writes down how it was called."""


class Checkout:
    """A folder with the Makefile; its interpreter and its programs do nothing."""

    def __init__(self, folder: Path) -> None:
        for name in ("Makefile", "requirements.lock", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        self._folder = folder
        self._log = folder / "log"
        for name in ("python", ".venv/bin/python", ".venv/bin/raystream"):
            program = folder / name
            program.parent.mkdir(parents=True, exist_ok=True)
            program.write_text(RAN.format(log=self._log))
            program.chmod(0o755)

    def make(self, target: str) -> list[str]:
        """Make a target; return which installations it ran, in order."""
        self._log.unlink(missing_ok=True)
        command = ["make", "PYTHON=./python", target]
        subprocess.run(command, cwd=self._folder, check=True, capture_output=True, timeout=60)
        ran = self._log.read_text().splitlines()
        return [line for line in ran if "install" in line or "venv" in line]

    def interrupt(self) -> None:
        """Leave the environment without pip."""
        python = self._folder / ".venv/bin/python"
        python.write_text(f"{python.read_text()}case $* in *--version) exit 1;; esac\n")

    def change(self, name: str) -> None:
        """Make a file newer than both stamps."""
        for stamp in (self._folder / ".venv").glob(".*"):
            os.utime(stamp, (1, 1))
        (self._folder / name).touch()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_serving_installs_only_what_it_needs_and_only_once(checkout: Checkout) -> None:
    assert checkout.make("serve") == [SERVING]
    assert checkout.make("serve") == []


@pytest.mark.parametrize("target", ["test", "quick", "k8s"])
def test_another_target_adds_the_rest_to_what_serves(checkout: Checkout, target: str) -> None:
    assert checkout.make("serve") == [SERVING]
    assert checkout.make(target) == [ALL]
    assert checkout.make(target) == checkout.make("serve") == []


def test_an_environment_for_tests_serves_without_an_installation(checkout: Checkout) -> None:
    assert checkout.make("quick") == [SERVING, ALL]
    assert checkout.make("serve") == []


def test_an_environment_whose_making_was_interrupted_is_made_again(checkout: Checkout) -> None:
    checkout.interrupt()
    assert checkout.make("serve") == ["-m venv .venv", SERVING]


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_a_change_of_the_packages_is_installed_by_whichever_target_comes_next(
    checkout: Checkout, name: str
) -> None:
    checkout.make("quick")
    checkout.change(name)
    assert checkout.make("serve") == [SERVING]
    assert checkout.make("quick") == [ALL]
    checkout.change(name)
    assert checkout.make("quick") == [SERVING, ALL]


def test_pre_commit_runs_what_make_check_runs() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [hook["entry"] for hook in repository["hooks"]]
    assert hooks
    assert commands_of("check").splitlines()[-len(hooks) :] == hooks


def test_each_file_that_needs_vllm_runs_once_and_beside_others_only_if_it_starts_no_engine() -> (
    None
):
    commands = commands_of("test-vllm")
    files = (ROOT / "tests/vllm_engine").glob("test_*.py")
    names = [f"tests/vllm_engine/{each.name}" for each in files if "mark.vllm" in each.read_text()]
    assert len(names) > 6
    assert [name for name in names if commands.count(name) != 1] == []
    (sharing,) = re.findall(r'confcutdir=tests/vllm_engine (tests/[^"]*)"', commands)
    assert "tests/vllm_engine/test_draws.py" in sharing.split()
    assert "tests/vllm_engine/test_engine.py" not in sharing.split()


def commands_of(target: str) -> str:
    """Return what make would run for a target of the repository."""
    made = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "--always-make", target],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return made.stdout


def test_ci_on_github_runs_what_ci_runs_elsewhere() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    runs = [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]
    assert runs[-1] == ".ci/run"
