"""The demo's end by a signal, with a small command in place of its server."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from serve_app.commands.user.demo import demo
from tests.ray.serve_run import ROOT, WITH_SIGNALS

DEADLINE_S = 60
DEMO = """
import subprocess, sys, time
from serve_app.commands.user.demo import server
from serve_app.commands.user.demo.demo import run_demo

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


@pytest.mark.parametrize(
    ("name", "why"),
    [("nosuch/demo.svg", "there is no folder {folder}/nosuch"), ("", "it can't be written")],
)
def test_a_picture_that_can_t_be_written_is_refused_before_the_server_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    why: str,
) -> None:
    monkeypatch.delattr(demo, "serving")  # nothing is to be started
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        file = tmp_path / name
        assert demo.run_demo(is_plain=True, keep=False, svg=file) == 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert capsys.readouterr().err == f"Error: {file}: {why.format(folder=tmp_path)}\n"
