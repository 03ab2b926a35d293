"""What listens while a server runs as `make serve` runs it, compared with docs/security.md."""

import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import grpc  # type: ignore[import-untyped] # grpcio ships no types
import httpx
import pytest

from tests.ray.open_sockets import TcpListener, UnixListener, tcp_listeners, unix_listeners
from tests.ray.serve_run import ROOT, Server

HOST = "127.0.0.1"
EVERY_INTERFACE = "::"
NUM_REPLICAS = 4
"""An ingress, and the replica of each of the three models."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("shipped_server", ["haproxy"], indirect=True, scope="package"),
]


def documented(heading: str) -> list[list[str]]:
    """Return the rows of the table under a heading of docs/security.md."""
    text = (ROOT / "docs" / "security.md").read_text()
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [re.split(r" *\| *", line)[1:-1] for line in re.findall(r"^\| `.*", section, re.M)]


@pytest.fixture
def tcp(server: Server) -> list[TcpListener]:
    return tcp_listeners(server.process.pid)


@pytest.fixture
def unix(server: Server) -> list[UnixListener]:
    return unix_listeners(server.process.pid)


def test_tcp_sockets_are_those_that_are_documented(tcp: list[TcpListener]) -> None:
    rows = {(process.strip("`"), host.strip("`")) for process, host, *_ in documented("TCP")}
    told = {(process, HOST if host == "host" else host) for process, host in rows}
    found = {(listener.process, listener.host) for listener in tcp}
    assert found <= told
    # The monitor's port is the same for every Ray, so another one on this machine may have it.
    assert told - found <= {("monitor", HOST)}
    assert Counter(listener.process for listener in tcp)["haproxy"] == 3


def test_only_calls_between_replicas_are_open_to_other_hosts_and_they_need_the_token(
    tcp: list[TcpListener],
) -> None:
    public = [listener for listener in tcp if listener.host != HOST]
    assert Counter((listener.process, listener.host) for listener in public) == {
        ("ray::ServeReplica", EVERY_INTERFACE): NUM_REPLICAS
    }
    for listener in public:
        with grpc.insecure_channel(f"{HOST}:{listener.port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as error:
                call(b"", timeout=30)
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_the_dashboard_needs_the_token(tcp: list[TcpListener]) -> None:
    ports = [listener.port for listener in tcp if listener.process == "dashboard"]
    answers = [httpx.get(f"http://{HOST}:{port}/api/jobs/", timeout=30) for port in ports]
    # The other port has metrics, whatever the path. It is the same for every Ray, so another one on
    # this machine may have it.
    assert {answer.status_code for answer in answers} in ({401}, {200, 401})
    assert all(b"# HELP" in answer.content for answer in answers if answer.is_success)


def test_unix_sockets_are_those_that_are_documented_and_private(unix: list[UnixListener]) -> None:
    rows = documented("Unix sockets")
    patterns = {
        (process.strip("`"), pattern) for process, names, _ in rows for pattern in quoted(names)
    }
    named = {(listener.process, bound_name(listener.path)) for listener in unix}
    unknown = {
        (process, name)
        for process, name in named
        if not any(process == p and fnmatch(name, pattern) for p, pattern in patterns)
    }
    assert not unknown
    missing = {
        (process, pattern)
        for process, pattern in patterns
        if not any(process == p and fnmatch(name, pattern) for p, name in named)
    }
    assert not missing
    assert [listener for listener in unix if not listener.is_private] == []


def quoted(cell: str) -> list[str]:
    """Return what is in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def bound_name(path: Path) -> str:
    """Return a socket's name, without what HAProxy appends before it renames the socket."""
    return re.sub(r"\.\d+\.tmp$", "", path.name)
