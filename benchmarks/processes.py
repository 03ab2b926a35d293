"""Servers under measurement: started, waited for, and ended with all that they have started."""

import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

START_DEADLINE_S = 180
END_DEADLINE_S = 30


@contextmanager
def started(
    command: Sequence[str], url: str, *, log: Path, cwd: Path | None = None
) -> Iterator[None]:
    """Run a server while the block runs.

    Args:
        command: What starts it in the foreground.
        url: Answers with 200 as soon as the server is ready.
        log: What it prints is written there.
        cwd: Where it starts.

    Raises:
        RuntimeError: It ended, or was not ready in time.
    """
    with log.open("wb") as file:
        process = psutil.Popen(
            list(command), stdout=file, stderr=subprocess.STDOUT, cwd=cwd, start_new_session=True
        )
        try:
            _wait_until_ready(process, url, log)
            yield
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
    """Ask the server to end, as Ctrl-C does, and end what is left."""
    family = [process, *process.children(recursive=True)] if process.is_running() else []
    if family:
        process.send_signal(signal.SIGINT)
    _, left = psutil.wait_procs(family, timeout=END_DEADLINE_S)
    for each in left:
        each.kill()
    psutil.wait_procs(left, timeout=END_DEADLINE_S)
