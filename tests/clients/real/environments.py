"""Environments of the clients: one for each, in `.venv-clients/`.

The clients contradict each other, and our own environment, in their versions of openai and litellm.
`requirements/<client>.txt` is a client's whole environment, resolved from `<client>.in`. The vLLM
benchmark's has only what the benchmark imports, since vLLM itself would need CUDA. npm installs the
clients of `NODE`.
"""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.ray.serve_run import ROOT

HERE = Path(__file__).parent
CACHE = ROOT / ".venv-clients"
NODE = {
    "claude-code": "@anthropic-ai/claude-code@2.1.332",
    "codex": "@openai/codex@0.169.0",
    "opencode": "opencode-ai@1.18.33",
    "promptfoo": "promptfoo@0.123.1",
}
"""The clients that npm installs, with their versions."""
PLACED_BY_SCRIPT = {"claude-code", "opencode"}
"""Their packages hold a program for each system, and their script puts one of them in its place."""
CLIENTS = [*sorted(path.stem for path in (HERE / "requirements").glob("*.txt")), *NODE]


def programs_of(client: str) -> list[Path]:
    """Return the folders of a client's programs; make its environment, unless it is current."""
    if client in NODE:
        return [_node_folder(client) / "node_modules/.bin", Path(sys.executable).parent]
    folder, lock = CACHE / client, HERE / "requirements" / f"{client}.txt"
    stamp = folder / ".installed"
    if not stamp.exists() or stamp.stat().st_mtime < lock.stat().st_mtime:
        venv.create(folder, clear=True, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        python = str(folder / "bin/python")
        _run([*pip, "--python", python, "install", "--quiet", "--no-deps", "-r", str(lock)])
        stamp.touch()
    return [folder / "bin"]


def _node_folder(client: str) -> Path:
    """Return the folder with a client of npm's, which is installed unless it is there."""
    package = NODE[client]
    folder = CACHE / package.replace("/", "-")
    if not (folder / ".installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        npm, prefix = str(Path(sys.executable).parent / "npm"), ["--prefix", str(folder)]
        options = ["--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        _run([npm, "install", *options, *prefix, package])
        if client in PLACED_BY_SCRIPT:
            _run([npm, "rebuild", *prefix, package.rpartition("@")[0]])
        (folder / ".installed").touch()
    return folder


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
