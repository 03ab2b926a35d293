"""The demo with a small command, or an application in this process, in place of its server."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import yaml

from serve_app.commands.user.demo import demo
from serve_app.commands.user.demo.server import DemoServer, Size, demo_config
from serve_app.config import AppConfig
from serve_app.shipped_files import CONFIG
from tests.ray.serve_run import ROOT, WITH_SIGNALS
from tests.serve_app.local_server import local_server

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


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore what the demo does to signals."""
    changed = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(each) for each in changed]
    yield
    for number, handler in zip(changed, before, strict=True):
        signal.signal(number, handler)


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
    file = tmp_path / name
    assert demo.run_demo(is_plain=True, keep=False, svg=file) == 1
    assert capsys.readouterr().err == f"Error: {file}: {why.format(folder=tmp_path)}\n"


@pytest.mark.slow
def test_a_slow_answer_is_parked_for_a_chat_and_is_equal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The soak shows the same with the demo's own server: tests/ray/test_demo.py."""

    @contextmanager
    def serving_here(tell: object, size: Size) -> Iterator[DemoServer]:
        (application,) = demo_config(yaml.safe_load(CONFIG.read_text()), 1, size)["applications"]
        config = AppConfig.model_validate(application["args"])
        with local_server(config) as local, local.listening() as url:
            yield DemoServer(url, process=cast("Any", None), log=Path())

    monkeypatch.setattr(demo, "serving", serving_here)
    assert demo.run_demo(is_plain=True, keep=False, svg=None, parks=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 of 1 equal, 0 tokens lost"
    batch, chat = (next(line for line in lines if line.startswith(f"{n}: ")) for n in (1, 2))
    assert re.search(r"priority 5: .* parked after \d+ tokens with a pause of", batch)
    assert "parked" not in chat
