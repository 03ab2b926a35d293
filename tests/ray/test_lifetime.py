"""Nothing outlives the server, however and whenever it ends, also during its start."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import psutil
import pytest

from serve_app.commands.run.supervise import STOP_S
from serve_app.commands.server_environment import is_free
from tests.ray.serve_run import (
    READY_DEADLINE_S,
    STOP_DEADLINE_S,
    Server,
    haproxy_environment,
    shipped_config,
    wait_until,
)

WAYS = ("SIGINT", "SIGTERM", "SIGHUP", "kill -9")
NUM_STARTS = int(os.environ.get("RAYSTREAM_SOAK_STARTS", "20"))
"""Starts for each way to end the server."""

LATEST_S = 30.0
"""The latest moment to end it. On an idle machine the server is ready after half of that."""

MARK = "RAYSTREAM_TEST_FOLDER"

pytestmark = pytest.mark.slow


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, folder: Path) -> Server:
    """Start a server whose processes all have a mark in their environment."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "HOME": str(folder), MARK: str(folder), **haproxy_environment()}
    server = Server(shipped_config(folder), folder / "serve.log", environment)
    stack.callback(server.kill)
    return server


def marked(folder: Path) -> list[psutil.Process]:
    """Return the processes that a server has started, wherever they are in the tree."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder):
                found.append(process)
        except psutil.Error:  # it has just ended, or is another user's
            continue
    return found


def end(server: Server, way: str) -> None:
    server.watch()
    if way == "kill -9":
        for driver in psutil.Process(server.process.pid).children():
            driver.kill()
    else:
        os.killpg(server.process.pid, signal.Signals[way])


def check_that_nothing_is_left(server: Server, folder: Path) -> None:
    """Fail if a process or the port outlives the supervisor."""
    left = [process.cmdline() for process in marked(folder) if process.is_running()]
    assert left == []
    assert is_free("127.0.0.1", server.port)


def wait_until_nothing_is_left(server: Server, folder: Path) -> None:
    # If Python loses the signal, the supervisor kills everything after this time.
    server.process.wait(STOP_S + STOP_DEADLINE_S)
    check_that_nothing_is_left(server, folder)


def end_at_random(stack: ExitStack, folder: Path, way: str, moment_s: float) -> None:
    """Start a server, end it after some seconds, and look for what is left."""
    server = start(stack, folder)
    with pytest.raises(subprocess.TimeoutExpired):
        server.process.wait(moment_s)
    end(server, way)
    wait_until_nothing_is_left(server, folder)


def test_nothing_outlives_a_server_that_ends_while_it_starts(
    servers: ExitStack, tmp_path: Path
) -> None:
    server = start(servers, tmp_path)
    wait_until(lambda: bool(server.processes("raylet/raylet")), READY_DEADLINE_S)
    assert not server.is_ready()
    end(server, "SIGTERM")
    wait_until_nothing_is_left(server, tmp_path)


@pytest.mark.soak
def test_a_server_on_a_ray_without_token_does_not_start(
    servers: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    server = start(servers, tmp_path)

    def is_refused() -> bool:
        assert not server.is_ready()
        return "auth: {allow_unauthenticated_ray: true}" in server.log.read_text()

    wait_until(is_refused, READY_DEADLINE_S)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(NUM_STARTS))
@pytest.mark.parametrize("way", WAYS)
def test_nothing_outlives_a_server_that_ends_at_a_random_moment(
    servers: ExitStack, tmp_path: Path, way: str, number: int
) -> None:
    end_at_random(servers, tmp_path, way, Random(f"{way} {number}").uniform(0.5, LATEST_S))


@pytest.mark.soak
def test_two_servers_run_side_by_side(servers: ExitStack, tmp_path: Path) -> None:
    first, second = (start(servers, tmp_path / name) for name in ("first", "second"))
    for server in (first, second):
        wait_until(server.is_ready, 2 * READY_DEADLINE_S)
    end(first, "SIGTERM")
    first.process.wait(STOP_DEADLINE_S)
    check_that_nothing_is_left(first, tmp_path / "first")
    assert second.is_ready()
