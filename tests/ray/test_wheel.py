"""Serving from the wheel, in an empty folder: with this environment's packages, and in its own."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.free_port import free_port
from tests.built_wheel import ROOT, build_wheel
from tests.ray.serve_run import wait_until
from tests.ray.started import started, streamed_answer

INSTALL_S = 1200
READY_S = 30

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def listen_on_a_free_port(packages: Path) -> str:
    """Change the port of the shipped configuration; return the server's URL."""
    config = packages / "serve_app" / "shipped" / "serve_config.yaml"
    port = free_port()
    config.write_text(re.sub(r"port: 8000\b", f"port: {port}", config.read_text()))
    return f"http://127.0.0.1:{port}"


def check_serving(
    command: list[str], empty: Path, environment: dict[str, str], packages: Path
) -> None:
    """Serve without naming a file; check that all comes from the wheel, as `make serve` runs it."""
    environment["HOME"] = str(empty.parent)
    url = listen_on_a_free_port(packages)
    with started([*command, "serve"], empty, environment, url) as (process_id, log):
        wait_until(lambda: "Ctrl-C stops the server." in log.read_text(), READY_S)
        assert streamed_answer(url).count("data: ") > 3
        names = {each.name() for each in psutil.Process(process_id).children(recursive=True)}
        assert any("haproxy" in name for name in names)
    told = log.read_text().splitlines()
    assert told[0] == "There is no serve_config.yaml here, so the embedded models are served."
    assert told[2] == "Starting Ray and the models of serve_config.yaml; large models take minutes."
    assert "Models: pydoc-chat (generate), pydoc-detector (classify), pydoc-search (embed)" in told
    assert told[-1] == "Stopped."
    assert list(empty.iterdir()) == []


def test_the_unpacked_wheel_serves_the_embedded_models_in_an_empty_folder(
    wheel: Path, empty: Path, tmp_path: Path
) -> None:
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    check_serving([sys.executable, "-m", "raystream"], empty, environment, unpacked)


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Iterator[Path]:
    """Install the wheel into an environment of its own, with the packages of the lock."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "--disable-pip-version-check", "--no-input", "install"]
    constraint = ["--constraint", str(ROOT / "requirements.lock")]
    subprocess.run([*pip, "--quiet", *constraint, str(wheel)], check=True, timeout=INSTALL_S)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.soak
def test_a_fresh_environment_serves_the_embedded_models_in_an_empty_folder(
    installed: Path, empty: Path
) -> None:
    (packages,) = installed.glob("lib/python*/site-packages")
    environment = {"PATH": f"{installed / 'bin'}:{os.environ['PATH']}"}
    check_serving([str(installed / "bin" / "raystream")], empty, environment, packages)
