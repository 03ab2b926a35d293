import json
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from ray.serve._private import constants

from benchmarks.free_port import free_ports
from serve_app.preflight import HAPROXY_PORTS, is_free, main

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the command on the shipped file with this port."""

    def run(port: int, **top: object) -> int:
        document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
        document["http_options"]["port"] = port
        path = tmp_path / "serve_config.yaml"
        path.write_text(yaml.safe_dump({**document, **top}))
        monkeypatch.setattr(sys, "argv", ["raystream-preflight", str(path)])
        return main()

    return run


@pytest.fixture
def taken() -> socket.socket:
    """Return a socket that listens on a port of its own."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def test_a_taken_port_is_told_in_one_line(
    run: Run, taken: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    port = taken.getsockname()[1]
    with taken:
        assert run(port) == 1
    error = capsys.readouterr().err
    assert f"{port} is in use on 127.0.0.1" in error
    assert error.count("\n") == 1
    assert is_free("127.0.0.1", port)


def test_the_ports_of_haproxy_s_mode_must_be_free_too(
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
        assert run(ours) == 0
        monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
        assert run(ours) == 1
    error = capsys.readouterr().err
    assert error.startswith("RAY_SERVE_HAPROXY_STATS_PORT: ")
    assert error.count("\n") == 1
    assert run(ours) == 0


def test_haproxy_s_ports_are_those_of_ray() -> None:
    told = {
        "RAY_SERVE_HAPROXY_STATS_PORT": constants.RAY_SERVE_HAPROXY_STATS_PORT,
        "RAY_SERVE_HAPROXY_METRICS_PORT": constants.RAY_SERVE_HAPROXY_METRICS_PORT,
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": constants.RAY_SERVE_FALLBACK_PROXY_HTTP_PORT,
    }
    assert told == HAPROXY_PORTS


def test_the_command_to_try_asks_the_configured_model_on_the_configured_port(
    run: Run, taken: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    port = taken.getsockname()[1]
    taken.close()
    assert run(port) == 0
    command = shlex.split(capsys.readouterr().out.split("try:")[1].replace("\\\n", " "))
    assert command[:3] == ["curl", "-N", f"http://127.0.0.1:{port}/v1/chat/completions"]
    assert json.loads(command[-1])["model"] == "pydoc-chat"


def test_a_wrong_file_is_refused_before_anything_else(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(1, proxy_lokation="EveryNode") == 1
    assert "proxy_lokation" in capsys.readouterr().err


def test_without_a_file_the_usage_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["raystream-preflight"])
    assert main() == 2
