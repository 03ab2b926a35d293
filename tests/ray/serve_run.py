"""`serve run` in a process of its own, as people start it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import yaml

from benchmarks.free_port import free_ports
from k8s.make_base import parse_env
from serve_app import haproxy
from serve_app.preflight import HAPROXY_PORTS

ROOT = Path(__file__).resolve().parents[2]
READY_DEADLINE_S = 120
STOP_DEADLINE_S = 10


def haproxy_environment() -> dict[str, str]:
    """Return what `make serve` sets, with ports that are free in place of Ray's fixed ones.

    With those a second server on the machine could not start beside the first.
    """
    ports = map(str, free_ports(len(HAPROXY_PORTS)))
    switches = parse_env((ROOT / "serve.env").read_text())
    program = Path(sys.executable).parent / "raystream-haproxy"
    return {
        **switches,
        **dict(zip(HAPROXY_PORTS, ports, strict=True)),
        haproxy.VARIABLE: str(program),
    }


def wait_until(condition: Callable[[], bool], deadline_s: float) -> float:
    """Wait until a condition holds; return how long it took, in seconds."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        assert waited < deadline_s, f"not within {deadline_s} s"
        time.sleep(0.05)
    return time.monotonic() - started


class Server:
    """`serve run` in a process group of its own, as a terminal gives it."""

    def __init__(self, config: Path, log: Path, environment: dict[str, str]) -> None:
        self.port = yaml.safe_load(config.read_text())["http_options"]["port"]
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [Path(sys.executable).parent / "serve", "run", "--address", "local", config],
                cwd=ROOT,
                # Ray reports its usage unless it is told not to.
                env={**environment, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
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

    def interrupt(self) -> float:
        """Do as Ctrl-C does; return how long the server took to end, in seconds."""
        self._family = set(psutil.Process(self.process.pid).children(recursive=True))
        os.killpg(self.process.pid, signal.SIGINT)
        return wait_until(lambda: self.process.poll() is not None, STOP_DEADLINE_S)

    def survivors(self) -> list[str]:
        """Return what the server has left behind, zombies aside."""
        left = [p for p in self._family if p.is_running()]
        return [str(p) for p in left if p.status() != psutil.STATUS_ZOMBIE]

    def kill(self) -> None:
        """End what is left, whether or not it was interrupted before."""
        if self.process.poll() is None:
            self._family |= set(psutil.Process(self.process.pid).children(recursive=True))
            self.process.kill()
            self.process.wait()
        for process in self._family:
            if process.is_running():
                process.kill()
