"""Starts servers to measure, waits for them, and ends them with all their child processes."""

import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

START_DEADLINE_S = 180
END_DEADLINE_S = 30


@contextmanager
def started(
    command: Sequence[str],
    url: str,
    *,
    log: Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[psutil.Popen]:
    """Run a server until the block ends.

    Args:
        command: Starts the server in the foreground.
        url: Answers with 200 as soon as the server is ready.
        log: The file for the server's output.
        cwd: The server's working directory.
        environment: The server's variables; None means this process's own.

    Yields:
        The process that the command started.

    Raises:
        RuntimeError: The server ended, or was not ready in time.
    """
    with log.open("wb") as file:
        process = psutil.Popen(
            list(command),
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )
        try:
            _wait_until_ready(process, url, log)
            yield process
        finally:
            _end(process)


def _wait_until_ready(process: psutil.Process, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise RuntimeError(f"the server has ended; see {log}")
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready after {START_DEADLINE_S} s; see {log}")


def _end(process: psutil.Process) -> None:
    """Interrupt the server as Ctrl-C does, and kill the processes that are left."""
    family = [process, *process.children(recursive=True)] if process.is_running() else []
    if family:
        process.send_signal(signal.SIGINT)
    _, left = psutil.wait_procs(family, timeout=END_DEADLINE_S)
    for each in left:
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            each.kill()
    psutil.wait_procs(left, timeout=END_DEADLINE_S)
