import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray.serve._private.haproxy import HAProxyApi, HAProxyConfig
from ray.serve.config import HTTPOptions, gRPCOptions

from serve_app.commands.run import haproxy
from serve_app.commands.server_environment import FOLDER_PARENT, HAPROXY_BINARY, free_ports
from tests.ray.serve_run import ROOT, wait_until

DEADLINE_S = 20
PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-m", "serve_app.commands.run.haproxy", *sys.argv[1:]]).wait()
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a path short enough for a socket's."""
    folder = tmp_path_factory.mktemp("haproxy")
    assert str(folder).startswith(FOLDER_PARENT)
    return folder


def ray_s_file(folder: Path, host: str | None) -> Path:
    """Write the file that Ray would write, and return its path."""
    port, stats_port, metrics_port = free_ports(3)
    config = HAProxyConfig(
        http_options=HTTPOptions(host=host, port=port),
        grpc_options=gRPCOptions(),
        stats_port=stats_port,
        metrics_port=metrics_port,
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        metrics_socket_path=str(folder / "metrics.sock"),
    )
    path = folder / "haproxy.cfg"
    HAProxyApi(config, config_file_path=str(path))._generate_config_file_internal()
    return path


def binds(text: str) -> list[str]:
    """Return the hosts of all `bind` lines."""
    lines = [line.split() for line in text.splitlines()]
    return [line[1].rpartition(":")[0] for line in lines if line[:1] == ["bind"]]


def test_the_process_becomes_haproxy() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "serve_app.commands.run.haproxy", "-v"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.startswith("HAProxy version 2.8")


def test_splicing_is_off_and_rays_arguments_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["raystream-haproxy", "-db", "-sf", "1"])
    monkeypatch.delenv(HAPROXY_BINARY, raising=False)
    monkeypatch.setattr(haproxy, "die_with_parent", lambda: None)
    monkeypatch.setattr(os, "execv", lambda _, arguments: started.append(arguments))
    haproxy.main()
    ((_, *arguments),) = started
    assert arguments == ["-dS", "-db", "-sf", "1"]


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("127.0.0.2", "127.0.0.2"),
        ("localhost", "127.0.0.1"),
        ("::1", "[::1]"),
        ("::0", "[::]"),
        ("0.0.0.0", "*"),
        (None, "*"),
    ],
)
def test_every_port_is_on_the_host_of_http_options(
    folder: Path, host: str | None, bound: str
) -> None:
    text = ray_s_file(folder, host).read_text()
    private = haproxy.private_configuration(text, {})
    # A reload must not change how a port is written: HAProxy takes sockets over by their address.
    assert binds(private) == [bound, bound, bound]
    assert "mode 666" not in private


@pytest.mark.parametrize("missing", ["frontend http_frontend", "stats socket"])
def test_a_configuration_of_another_ray_is_refused(folder: Path, missing: str) -> None:
    text = ray_s_file(folder, "127.0.0.1").read_text().replace(missing, "# ")
    with pytest.raises(haproxy.UnknownConfigurationError, match="version of Ray"):
        haproxy.private_configuration(text, {})


def test_haproxy_reads_the_copy_and_ray_finds_its_own_path(folder: Path) -> None:
    path = ray_s_file(folder, "127.0.0.1")
    original = path.read_text()
    arguments = haproxy.private_arguments(["-db", "-f", str(path), "-dR", "-sf", "7"])
    copy = folder / "private-haproxy.cfg"
    assert arguments == ["-db", "-f", str(copy), "-L", str(path), "-dR", "-sf", "7"]
    assert copy.read_text() == haproxy.private_configuration(original, {})
    assert path.read_text() == original
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {"private-haproxy.cfg", "haproxy.cfg"} <= {file.name for file in folder.iterdir()}
    assert not list(folder.glob("private-haproxy.cfg.*"))


def test_a_lost_worker_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(haproxy.RAYLET, raising=False)
    assert not haproxy.has_lost_worker()
    # pytest's parent is no worker of this raylet.
    monkeypatch.setenv(haproxy.RAYLET, str(os.getpid()))
    assert haproxy.has_lost_worker()


def test_a_child_of_a_worker_has_not_lost_it() -> None:
    code = (
        "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', 'from "
        "serve_app.commands.run.haproxy import has_lost_worker as lost; exit(lost())']).returncode)"
    )
    environment = {**os.environ, haproxy.RAYLET: "12345"}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=False)
    assert run.returncode == 0


class Started:
    """HAProxy below a process in place of Ray's worker."""

    def __init__(self, path: Path) -> None:
        environment = {**os.environ, haproxy.RAYLET: "12345"}
        self.worker = subprocess.Popen(
            [sys.executable, "-c", PARENT, "-db", "-f", str(path)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda: len(self.listeners()) == 3, DEADLINE_S)
        (self.process,) = psutil.Process(self.worker.pid).children()

    def listeners(self) -> set[str]:
        """Return the addresses, with their ports, that HAProxy listens on."""
        assert self.worker.poll() is None
        return {
            f"{connection.laddr.ip}:{connection.laddr.port}"
            for process in psutil.Process(self.worker.pid).children()
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }

    def is_running(self) -> bool:
        return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def started(folder: Path) -> Iterator[Started]:
    started = Started(ray_s_file(folder, "127.0.0.1"))
    yield started
    if started.is_running():
        started.process.kill()
    started.worker.kill()
    started.worker.wait()


@pytest.mark.processes
@pytest.mark.slow
def test_haproxy_listens_on_one_host_and_ends_with_its_worker(
    started: Started, folder: Path
) -> None:
    assert {address.rpartition(":")[0] for address in started.listeners()} == {"127.0.0.1"}
    admin = folder / "admin.sock"
    assert stat.S_IMODE(admin.stat().st_mode) == 0o600
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(admin))
        client.sendall(b"show info\n")
        assert f"Pid: {started.process.pid}" in client.makefile().read()
    started.worker.kill()
    started.worker.wait()
    wait_until(lambda: not started.is_running(), DEADLINE_S)
