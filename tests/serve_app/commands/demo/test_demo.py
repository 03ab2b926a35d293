"""The demo's end by a signal, with a small command in place of its server."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.ray.serve_run import ROOT, WITH_SIGNALS

DEADLINE_S = 60
DEMO = """
import subprocess, sys, time
from serve_app.commands.demo import server
from serve_app.commands.demo.demo import run_demo

def start(folder):
    return subprocess.Popen(["sleep", "600"], start_new_session=True)

def wait_until_ready(self):
    print("up", self.process.pid, flush=True)
    time.sleep(600)

server._start = start
server.DemoServer.wait_until_ready = wait_until_ready
sys.exit(run_demo(is_plain=True, keep=False, svg=None))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_server_and_gives_the_exit_code(
    number: signal.Signals, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WITH_SIGNALS, sys.executable, "-c", DEMO],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        try:
            server = next(line.split()[1] for line in demo.stdout if line.startswith("up "))
            demo.send_signal(number)
            assert demo.wait(DEADLINE_S) == 128 + number
            told = demo.stdout.read()
        finally:
            demo.kill()
    assert not psutil.pid_exists(int(server))
    assert "Stopping the server." in told
    assert "Traceback" not in told
