"""Environments of the clients: one for each, in `.venv-clients/`.

The clients contradict each other, and our own environment, in their versions of openai and litellm.
`requirements/<client>.txt` is a client's whole environment, resolved from `<client>.in`. The vLLM
benchmark's has only what the benchmark imports, since vLLM itself would need CUDA.
"""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.ray.serve_run import ROOT

HERE = Path(__file__).parent
CACHE = ROOT / ".venv-clients"
PROMPTFOO = "promptfoo@0.123.1"
CLIENTS = [*sorted(path.stem for path in (HERE / "requirements").glob("*.txt")), "promptfoo"]


def programs_of(client: str) -> list[Path]:
    """Return the folders of a client's programs; make its environment, unless it is current."""
    if client == "promptfoo":
        return [_promptfoo_folder() / "node_modules/.bin", Path(sys.executable).parent]
    folder, lock = CACHE / client, HERE / "requirements" / f"{client}.txt"
    stamp = folder / ".installed"
    if not stamp.exists() or stamp.stat().st_mtime < lock.stat().st_mtime:
        venv.create(folder, clear=True, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        python = str(folder / "bin/python")
        _run([*pip, "--python", python, "install", "--quiet", "--no-deps", "-r", str(lock)])
        stamp.touch()
    return [folder / "bin"]


def _promptfoo_folder() -> Path:
    """Return the folder with promptfoo's packages, which are installed unless they are there."""
    folder = CACHE / PROMPTFOO
    if not (folder / ".installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        npm = str(Path(sys.executable).parent / "npm")
        options = ["--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        _run([npm, "install", *options, "--prefix", str(folder), PROMPTFOO])
        (folder / ".installed").touch()
    return folder


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
