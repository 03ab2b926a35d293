"""`raystream supervise COMMAND...`: runs a server, and lets nothing outlive it.

Ray's driver starts about twenty processes. When it is killed, some of them stay for a minute, and
HAProxy stays forever. The supervisor adopts all orphans among its descendants. When the command has
ended, it kills all of them. If the supervisor itself is killed, so is the command.

SIGINT, SIGTERM and SIGHUP become one SIGINT for the command, which `raystream serve`'s driver and
`serve run` answer by shutting down in order. The command has a session of its own, because a signal
to the terminal's process group would reach all of Ray at once. A second request, or STOP_S without
success, kills everything.

It calls nothing that macOS lacks. There, orphans are not adopted, but HAProxy does not run either.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from serve_app.commands.run.process_ties import adopt_orphans, die_with_parent
from serve_app.commands.run.server_record import hold_record
from serve_app.commands.server_environment import (
    NoFolderError,
    make_own_folder,
    server_environment,
)

STOP_S = 40.0
"""Most seconds for an orderly stop; Serve gives itself 30.

While Python imports modules it can lose a SIGINT ("Exception ignored in ..."), and the command
then runs on.
"""

SAME_REQUEST_S = 2.0
"""Signals within this time are one request: a terminal that closes sends SIGHUP twice."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_supervised(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command as `supervise` does, with a server's variables and a folder of its own.

    While it runs, `raystream status` finds it (`server_record`).

    Raises:
        NoFolderError: There is no folder for the server's files, or no room in it.
        OSError: The command can't be run.
    """
    folder = make_own_folder(environment)
    try:
        try:
            lock = hold_record(folder, command)
        except OSError as error:
            raise NoFolderError(f"{folder.parent} can't be written: {error.strerror}") from error
        with lock:
            return supervise(command, server_environment(environment, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def supervise(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run the command until it ends or is stopped, and end all its descendants.

    Returns:
        Its exit code, or 128 + the signal that killed it, as a shell reports it.
    """
    # `nohup` and a shell's background jobs ignore some of them, and so does their server.
    heeded = {s for s in STOP_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN}
    awaited: set[int] = {*heeded, signal.SIGCHLD, signal.SIGALRM}
    # An ignored signal can't be awaited on every system, and a parent may have had SIGCHLD ignored.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Blocked signals wait for `sigwait`, so that none is lost between two waits. They stay
    # blocked: a further one must not keep this process from killing what is left.
    mask: set[int] = set(signal.pthread_sigmask(signal.SIG_BLOCK, awaited))
    adopt_orphans()
    child = _start(command, environment, mask)
    try:
        _wait(child, awaited)
    finally:
        _kill_descendants(child)
    code = child.returncode
    return code if code >= 0 else 128 - code


def _start(
    command: Sequence[str], environment: dict[str, str], mask: set[int]
) -> subprocess.Popen[bytes]:
    supervisor = os.getpid()

    def tie() -> None:
        # Otherwise a server in the background of a script would ignore the signal that stops it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        die_with_parent()
        if os.getppid() != supervisor:  # killed before the request
            os.kill(os.getpid(), signal.SIGKILL)

    return subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=tie)


def _wait(child: subprocess.Popen[bytes], awaited: set[int]) -> None:
    """Return when the child has ended or must be killed."""
    asked_s: float | None = None
    while child.poll() is None:
        received = signal.sigwait(awaited)
        if received == signal.SIGCHLD:
            _reap(child)
        elif asked_s is None:
            asked_s = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, STOP_S)
            child.send_signal(signal.SIGINT)
        elif received == signal.SIGALRM or time.monotonic() - asked_s > SAME_REQUEST_S:
            return


def _kill_descendants(child: subprocess.Popen[bytes]) -> None:
    """Kill all processes below this one, also those that they start meanwhile."""
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _note(child, *os.waitpid(-1, 0))
        _reap(child)


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Take note of all children that have ended; most of them were adopted."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            _note(child, *ended)


def _note(child: subprocess.Popen[bytes], pid: int, status: int) -> None:
    if pid == child.pid:
        child.returncode = os.waitstatus_to_exitcode(status)
