import sys
from pathlib import Path

import pytest
from ray._private import ray_constants
from ray.serve._private import constants

from serve_app.commands.server_environment import (
    CHOSEN_PORTS,
    FOLDER_PARENT,
    HAPROXY,
    HAPROXY_BINARY,
    HAPROXY_FILES,
    HAPROXY_PORTS,
    LOOPBACK,
    MissingHAProxyError,
    is_free,
    server_environment,
    with_switches,
)
from serve_app.shipped_files import SHIPPED, parse_env

FOLDER = Path(FOLDER_PARENT, "raystream-12345678")
LONGEST_SOCKET_PATH = 107


def test_the_variables_are_those_of_ray() -> None:
    assert {name: getattr(constants, name) for name in HAPROXY_PORTS} == HAPROXY_PORTS
    assert all(hasattr(constants, name) for name in HAPROXY_FILES)
    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR == LOOPBACK


def test_each_server_gets_free_ports_and_a_folder_of_its_own() -> None:
    environment = server_environment({}, FOLDER)
    ports = {int(environment[name]) for name in HAPROXY_PORTS}
    assert len(ports) == len(HAPROXY_PORTS)
    assert all(is_free("127.0.0.1", port) for port in ports)
    assert all(Path(environment[name]).is_relative_to(FOLDER) for name in HAPROXY_FILES)


def test_chosen_ports_are_not_among_those_that_any_process_may_get() -> None:
    if sys.platform == "linux":
        given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        assert CHOSEN_PORTS[-1] < int(given[0])
    assert CHOSEN_PORTS[-1] < constants.RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT
    environment = server_environment({}, FOLDER)
    assert {int(environment[name]) for name in HAPROXY_PORTS} <= set(CHOSEN_PORTS)


def test_variables_that_are_set_stay() -> None:
    own = {"RAY_SERVE_HAPROXY_STATS_PORT": "8404", LOOPBACK: "1", "HOME": "/root"}
    environment = server_environment(own, FOLDER)
    assert own.items() <= environment.items()


def test_the_longest_name_of_a_socket_fits_below_the_folder() -> None:
    node = "f" * 56
    for variable in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        path = Path(server_environment({}, FOLDER)[variable])
        # HAProxy binds a socket under a temporary name, which ends in its process id.
        longest = path.parent / node / f"{path.name}.4194304.tmp"
        assert len(str(longest)) <= LONGEST_SOCKET_PATH


def test_serve_s_switches_are_those_of_serve_env_unless_they_are_set_otherwise() -> None:
    switches = parse_env((SHIPPED / "serve.env").read_text())
    environment = with_switches({"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "3", "HOME": "/root"})
    own = {"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "3", "HOME": "/root"}
    haproxy = str(Path(sys.executable).with_name("raystream-haproxy"))
    assert environment == {**switches, HAPROXY_BINARY: haproxy, **own}


def test_haproxy_s_mode_is_left_out_where_our_haproxy_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    environment = with_switches({})
    assert (environment[HAPROXY], HAPROXY_BINARY in environment) == ("0", False)
    program = tmp_path / "raystream-haproxy"
    program.touch(mode=0o755)
    assert with_switches({})[HAPROXY_BINARY] == str(program)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert with_switches({})[HAPROXY_BINARY] == str(program)  # as PATH names it


@pytest.mark.parametrize(
    "own", [{HAPROXY: "1"}, {HAPROXY: "1", HAPROXY_BINARY: "/nowhere/haproxy"}]
)
def test_haproxy_that_is_asked_for_and_missing_is_told(
    own: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingHAProxyError, match="is missing"):
        with_switches(own)


def test_indented_comments_are_no_variables_and_quotes_are_refused() -> None:
    assert parse_env("  # x=1\n\n a=b=c\n") == {"a": "b=c"}
    with pytest.raises(ValueError, match="without quotes"):
        parse_env('a="b"')
