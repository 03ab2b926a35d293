"""The supervisor with small commands in place of Ray; `tests/ray/test_lifetime.py` has the real."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from serve_app.commands.run.supervise import SAME_REQUEST_S
from serve_app.commands.server_environment import FOLDER_PARENT
from tests.ray.serve_run import ROOT, WITH_SIGNALS, wait_until

DEADLINE_S = 20
ORPHAN = "subprocess.Popen(['sleep', '600'], start_new_session=True)"
PRELUDE = "import os, signal, subprocess, sys, time\n"
SLEEP = "print('up', flush=True)\ntime.sleep(600)\n"

pytestmark = [pytest.mark.processes, pytest.mark.slow]


class Supervised:
    """A command in Python under the supervisor."""

    def __init__(self, code: str) -> None:
        command = [sys.executable, "-m", "serve_app", "supervise"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", WITH_SIGNALS, *command, sys.executable, "-c", PRELUDE + code],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.family: list[psutil.Process] = []

    def line(self) -> str:
        """Return the next line of the command's output."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        return line

    def code(self) -> int:
        """Return the exit code, once there is one."""
        return self.process.wait(DEADLINE_S)

    def is_left(self) -> bool:
        """Return whether a descendant still runs."""
        return any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in self.family)


@pytest.fixture
def started() -> Iterator[list[Supervised]]:
    """Return a list for what a test starts; it is killed at the end."""
    started: list[Supervised] = []
    yield started
    for one in started:
        one.process.kill()
        one.process.wait()
        for process in one.family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for pipe in (one.process.stdin, one.process.stdout):
            assert pipe is not None
            pipe.close()


def start(started: list[Supervised], code: str) -> Supervised:
    started.append(Supervised(code))
    return started[-1]


@pytest.mark.parametrize(
    ("code", "expected"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137)]
)
def test_the_exit_code_is_the_command_s(
    started: list[Supervised], code: str, expected: int
) -> None:
    assert start(started, code).code() == expected


def test_what_the_command_leaves_behind_is_killed(started: list[Supervised]) -> None:
    supervised = start(started, f"{ORPHAN}\n{SLEEP}")
    assert supervised.line() == "up"
    assert len(supervised.family) == 2
    supervised.family[0].kill()
    assert supervised.code() == 137
    assert not supervised.is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_request_to_stop_interrupts_the_command_once(
    started: list[Supervised], number: signal.Signals
) -> None:
    code = f"{ORPHAN}\ntry:\n    print('up', flush=True)\n    time.sleep(600)\n"
    code += "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n    sys.exit(3)\n"
    supervised = start(started, code)
    assert supervised.line() == "up"
    os.killpg(supervised.process.pid, number)
    assert supervised.code() == 3
    assert supervised.process.stdout is not None
    assert supervised.process.stdout.read() == "interrupted\n"
    assert not supervised.is_left()


def test_a_second_request_kills_a_command_that_does_not_stop(started: list[Supervised]) -> None:
    # Not by print: a handler may come while the command still prints "up", which is refused.
    code = "signal.signal(signal.SIGINT, lambda *_: os.write(1, b'no\\n'))\n" + SLEEP
    supervised = start(started, code + SLEEP)
    assert supervised.line() == "up"
    supervised.process.terminate()
    assert supervised.line() == "no"

    def is_ended_by_another() -> bool:
        supervised.process.terminate()  # without effect for the first SAME_REQUEST_S
        return supervised.process.poll() is not None

    assert wait_until(is_ended_by_another, DEADLINE_S) > SAME_REQUEST_S / 2
    assert supervised.code() == 137
    assert not supervised.is_left()


def test_a_signal_that_comes_twice_at_once_is_one_request(started: list[Supervised]) -> None:
    """The shell and the kernel each send SIGHUP when a terminal is closed."""
    code = "try:\n    print('up', flush=True)\n    time.sleep(600)\nexcept KeyboardInterrupt:\n"
    code += "    print('interrupted', flush=True)\n    sys.exit(int(sys.stdin.readline()))\n"
    supervised = start(started, code)
    assert supervised.line() == "up"
    supervised.process.send_signal(signal.SIGHUP)
    assert supervised.line() == "interrupted"
    supervised.process.send_signal(signal.SIGHUP)
    assert supervised.process.stdin is not None
    supervised.process.stdin.write("3\n")
    supervised.process.stdin.close()
    assert supervised.code() == 3


CHANGED = """
import os, signal, sys
{change}
from serve_app.commands.run import supervise
supervise.STOP_S = 0.2
sys.exit(supervise.run_supervised([sys.executable, "-c", {command!r}], os.environ))
"""


def run_changed(command: str, change: str) -> int:
    """Return the exit code of a command under a supervisor that does not wait long."""
    code = CHANGED.format(change=change, command=command)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False
    ).returncode


def test_a_command_that_does_not_stop_in_time_is_killed() -> None:
    deaf = "import os, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    deaf += "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(600)"
    assert run_changed(deaf, change="") == 137


@pytest.mark.parametrize(
    "change",
    [
        "del signal.sigtimedwait, signal.sigwaitinfo, os.waitid",  # macOS
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",  # a parent may have done so
    ],
)
def test_the_exit_code_is_known_where_the_system_differs(change: str) -> None:
    assert run_changed("raise SystemExit(7)", change) == 7


def test_the_command_ends_with_its_supervisor(started: list[Supervised]) -> None:
    supervised = start(started, SLEEP)
    assert supervised.line() == "up"
    supervised.process.kill()
    wait_until(lambda: not supervised.is_left(), DEADLINE_S)


def test_the_folder_is_the_user_s_own_and_goes_with_the_server(started: list[Supervised]) -> None:
    show = "print(os.environ['RAY_SERVE_HAPROXY_SOCKET_PATH'], flush=True)\ntime.sleep(600)"
    supervised = start(started, show)
    folder = Path(supervised.line()).parent
    assert str(folder.parent) == FOLDER_PARENT
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    supervised.process.terminate()
    supervised.code()
    assert not folder.exists()


def test_processes_that_end_meanwhile_are_reaped(started: list[Supervised]) -> None:
    orphan = "subprocess.run(['sh', '-c', 'sleep 0.1 & exit'])\n"
    supervised = start(started, orphan + SLEEP)
    assert supervised.line() == "up"
    wait_until(lambda: len(psutil.Process(supervised.process.pid).children()) == 1, DEADLINE_S)


def test_without_a_command_the_usage_is_shown() -> None:
    command = [sys.executable, "-m", "serve_app", "supervise"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert "Usage: raystream supervise" in answer.stderr
