import os
import subprocess
import sys
from pathlib import Path
from urllib.request import proxy_bypass

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
    MIDDLEWARE,
    SERVER_EDGE,
    MissingHAProxyError,
    is_free,
    server_environment,
    with_switches,
)
from serve_app.middleware import server_edge
from serve_app.shipped_files import SHIPPED, parse_env, serve_variables
from tests.recording_proxy import recording_proxy

FOLDER = Path(FOLDER_PARENT, "raystream-12345678")
LONGEST_SOCKET_PATH = 107


def test_the_variables_are_those_of_ray() -> None:
    assert {name: getattr(constants, name) for name in HAPROXY_PORTS} == HAPROXY_PORTS
    assert all(hasattr(constants, name) for name in HAPROXY_FILES)
    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR == LOOPBACK
    assert hasattr(constants, MIDDLEWARE)
    assert serve_variables()[MIDDLEWARE] == SERVER_EDGE
    assert f"{server_edge.__name__}:{server_edge.server_edge.__name__}" == SERVER_EDGE


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


PROXY = "http://proxy.example:3128"


def test_calls_inside_a_server_never_go_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"http_proxy": PROXY, "https_proxy": PROXY, "grpc_proxy": PROXY}
    environment = server_environment(given, FOLDER)
    assert environment["grpc_proxy"] == ""
    monkeypatch.setenv("no_proxy", environment["no_proxy"])
    assert proxy_bypass("127.0.0.1:8265")
    assert not proxy_bypass("huggingface.co")
    assert environment["no_proxy"] == environment["NO_PROXY"]
    assert environment["http_proxy"] == environment["https_proxy"] == PROXY
    assert serve_variables()["grpc_proxy"] == ""


@pytest.mark.parametrize("variable", ["no_proxy", "NO_PROXY"])
def test_hosts_that_have_no_proxy_keep_none(variable: str) -> None:
    direct = server_environment({variable: "intra.example, localhost"}, FOLDER)["no_proxy"]
    assert direct.split(",")[:2] == ["intra.example", "localhost"]
    assert direct.count("localhost") == 1
    # Some programs take only the bare asterisk for every host.
    assert server_environment({variable: "*"}, FOLDER)["no_proxy"] == "*"


@pytest.mark.slow
def test_downloads_from_the_hub_go_through_the_proxy(tmp_path: Path) -> None:
    with recording_proxy() as proxy:
        own = {**os.environ, **proxy.variables, "HF_ENDPOINT": "http://hub.example"}
        environment = server_environment(own | {"HF_HUB_CACHE": str(tmp_path)}, FOLDER)
        code = "import huggingface_hub as h; h.hf_hub_download('user/model', 'config.json')"
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert ended.returncode == 1
    assert proxy.asked
    assert all(" http://hub.example/" in line for line in proxy.asked)


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
