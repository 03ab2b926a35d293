"""The load tester runs without the server's packages."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from loadtest.mock.script import Behaviour, Script
from loadtest.mock.server import MockServer, serving

DEADLINE_S = 60
ROOT = Path(__file__).resolve().parents[2]
BLOCKING = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "ray", "transformers", "serve_app", "deployments"}:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Blocker())
from loadtest.cli import app
app(sys.argv[1:])
"""


@pytest.mark.slow
async def test_a_whole_run_imports_nothing_of_the_server(tmp_path: Path) -> None:
    server = MockServer(Script(Behaviour(num_events=3)))
    async with serving(server, "127.0.0.1", 0) as port:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", BLOCKING, "run", url, "-q", "2", "-n", "2"),
            *("--out", str(tmp_path / "run"), "--png"),
            cwd=ROOT,
            stdout=PIPE,
            stderr=PIPE,
        )
        async with asyncio.timeout(DEADLINE_S):
            _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["results"][0]["num_successes"] == 4
