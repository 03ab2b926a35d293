import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from benchmarks.free_port import free_ports
from serve_app.commands import preflight
from serve_app.commands.check import BUILDER
from serve_app.commands.preflight import passes
from serve_app.commands.server_environment import HAPROXY_PORTS, is_free

ROOT = Path(__file__).resolve().parents[3]
Run = Callable[..., bool]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that checks the shipped file with this port."""

    def run(port: int, **top: object) -> bool:
        document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
        document["http_options"]["port"] = port
        path = tmp_path / "serve_config.yaml"
        path.write_text(yaml.safe_dump({**document, **top}))
        return passes(str(path))

    return run


@pytest.fixture
def taken() -> socket.socket:
    """Return a socket that listens on a port of its own."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def test_a_used_port_is_reported_in_one_line(
    run: Run, taken: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    port = taken.getsockname()[1]
    with taken:
        assert not run(port)
    error = capsys.readouterr().err
    assert f"{port} is in use on 127.0.0.1" in error
    assert error.count("\n") == 1
    assert is_free("127.0.0.1", port)


def test_ports_that_are_set_for_haproxy_s_mode_must_be_free_too(
    run: Run,
    taken: socket.socket,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, *ports = free_ports(1 + len(HAPROXY_PORTS))
    for variable, port in zip(HAPROXY_PORTS, ports, strict=True):
        monkeypatch.setenv(variable, str(port))
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", str(taken.getsockname()[1]))
    with taken:
        assert run(ours)
        monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
        assert not run(ours)
    error = capsys.readouterr().err
    assert error.startswith("RAY_SERVE_HAPROXY_STATS_PORT: ")
    assert error.count("\n") == 1
    assert run(ours)


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7", "no-such-host.invalid"])
def test_a_host_of_another_machine_is_reported_in_one_line(
    run: Run, host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = free_ports(1)
    args = {"models": [{"id": "m", "source": "x"}], "auth": {"allow_anonymous": True}}
    applications = [{"import_path": BUILDER, "args": args}]
    assert not run(port, http_options={"host": host, "port": port}, applications=applications)
    error = capsys.readouterr().err
    assert f"http_options.host: {host!r} is no address of this machine, which has " in error
    assert "127.0.0.1" in error
    assert error.count("\n") == 1


def test_a_port_of_the_administrator_is_reported_in_one_line(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(host: str, port: int) -> bool:
        raise PermissionError

    monkeypatch.setattr(preflight, "is_free", refuse)
    assert not run(80)
    error = capsys.readouterr().err
    assert "http_options.port: the system lets only its administrator listen on 80" in error
    assert error.count("\n") == 1


def test_haproxy_s_other_ports_differ_from_the_server_s(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in HAPROXY_PORTS:
        monkeypatch.delenv(variable, raising=False)
    (port,) = free_ports(1)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", str(port))
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert not run(port)
    assert capsys.readouterr().err.startswith("RAY_SERVE_HAPROXY_STATS_PORT: ")


@pytest.mark.parametrize("value", ["stats", "", "-1", "0", "65536", "8404.0", "²"])
def test_a_variable_that_is_no_port_is_reported_in_one_line(
    run: Run,
    value: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in HAPROXY_PORTS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", value)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    (port,) = free_ports(1)
    assert not run(port)
    error = capsys.readouterr().err
    assert error.startswith(f"RAY_SERVE_HAPROXY_STATS_PORT: {value!r} is not a port")
    assert error.count("\n") == 1


def test_https_is_refused_in_haproxy_s_mode_and_without_its_files(
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (port,) = free_ports(1)
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    http = {"host": "127.0.0.1", "port": port}
    http |= {"ssl_keyfile": str(key), "ssl_certfile": str(certificate)}
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
    key.touch()
    assert not run(port, http_options=http)
    assert f"http_options.ssl_certfile: '{certificate}' is no file" in capsys.readouterr().err
    certificate.touch()
    assert run(port, http_options=http), capsys.readouterr().err
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert not run(port, http_options=http)
    assert "http_options.ssl_certfile: HAProxy's mode has no HTTPS" in capsys.readouterr().err


def test_a_wrong_file_is_refused_before_anything_else(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not run(1, proxy_lokation="EveryNode")
    assert "proxy_lokation" in capsys.readouterr().err
