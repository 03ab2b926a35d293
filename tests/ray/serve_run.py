"""`make serve`, or `serve run`, in a process of its own, as users start it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import yaml

from benchmarks.free_port import free_port
from serve_app.commands.run.supervise import STOP_S
from serve_app.commands.server_environment import HAPROXY_BINARY
from serve_app.shipped_files import parse_env

ROOT = Path(__file__).resolve().parents[2]
READY_DEADLINE_S = 300
STOP_DEADLINE_S = 10
RAYSTREAM = (sys.executable, "-m", "serve_app")
MAKE_SERVE = (*RAYSTREAM, "serve")
"""Starts the application of a file as `make serve` does."""
SERVE = str(Path(sys.executable).parent / "serve")
SUPERVISE = (*RAYSTREAM, "supervise")
SERVE_RUN = (*SUPERVISE, SERVE, "run", "--address", "local")
"""Starts the applications of a file, whatever their builders."""
WITH_SIGNALS = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a program with the default dispositions of SIGINT and SIGHUP.

As a background job of a script pytest ignores SIGINT, and under nohup SIGHUP. A child inherits
that, and `raystream supervise` then ignores them, too. `preexec_fn` is not safe in a process with
threads.
"""


def haproxy_environment() -> dict[str, str]:
    """Return the variables that `make serve` sets."""
    program = Path(sys.executable).parent / "raystream-haproxy"
    return {**parse_env((ROOT / "serve.env").read_text()), HAPROXY_BINARY: str(program)}


def shipped_config(folder: Path) -> Path:
    """Return the shipped file with a free port."""
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    document["http_options"]["port"] = free_port()
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def wait_until(condition: Callable[[], bool], deadline_s: float, poll_s: float = 0.05) -> float:
    """Wait until a condition holds; return the seconds that took."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        assert waited < deadline_s, f"not within {deadline_s} s"
        time.sleep(poll_s)
    return time.monotonic() - started


class Server:
    """A server in a process group of its own, as a terminal gives it."""

    def __init__(
        self,
        config: Path,
        log: Path,
        environment: dict[str, str],
        command: Sequence[str] = MAKE_SERVE,
    ) -> None:
        self.port = yaml.safe_load(config.read_text())["http_options"]["port"]
        self.config = config
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WITH_SIGNALS, *command, config],
                cwd=ROOT,
                # Ray reports its usage by default.
                env={**environment, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,
            )
        self._family: set[psutil.Process] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def has_ended(self) -> bool:
        """Whether the command has ended; take note of its processes until then."""
        if self.process.poll() is None:
            self.watch()
        return self.process.poll() is not None

    def watch(self) -> None:
        """Take note of all processes of the server."""
        with suppress(psutil.NoSuchProcess):
            self._family |= set(psutil.Process(self.process.pid).children(recursive=True))

    def processes(self, title: str) -> list[psutil.Process]:
        """Return the server's processes whose command contains this."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # a zombie, too
                if title in " ".join(process.cmdline()[:1]):
                    found.append(process)
        return found

    def interrupt(self) -> float:
        """Interrupt the server like Ctrl-C; return the seconds it took to end.

        The supervisor kills what has not ended in `STOP_S`; the server has failed then.
        """
        self.watch()
        os.killpg(self.process.pid, signal.SIGINT)
        return wait_until(lambda: self.process.poll() is not None, 2 * STOP_S)

    def survivors(self) -> list[str]:
        """Return the processes that the server has left behind, except zombies."""
        left = [p for p in self._family if p.is_running()]
        return [str(p) for p in left if p.status() != psutil.STATUS_ZOMBIE]

    def kill(self) -> None:
        """Kill the processes that are left, whether or not the server was interrupted."""
        if self.process.poll() is None:
            self.watch()
            # Its supervisor then ends, too, and removes its folder.
            for process in psutil.Process(self.process.pid).children():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_DEADLINE_S)
            self.process.kill()
            self.process.wait()
        for process in self._family:
            if process.is_running():
                process.kill()


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Wait until a server is ready, and kill at the end what is left of it."""
    try:
        wait_until(server.is_ready, READY_DEADLINE_S)
        yield server
    finally:
        server.kill()
