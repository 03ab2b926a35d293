import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import proxy_bypass

import pytest
from ray._private import ray_constants
from ray.serve._private import constants

from serve_app.commands import server_environment as server_environment_module
from serve_app.commands.server_environment import (
    CHOSEN_PORTS,
    FOLDER_PARENT,
    HAPROXY,
    HAPROXY_BINARY,
    HAPROXY_FILES,
    HAPROXY_PORTS,
    LOOPBACK,
    MAX_SOCKET_PATH,
    MIDDLEWARE,
    RAY_FOLDER,
    RAY_NAMES,
    SERVER_EDGE,
    TOKEN_FILE,
    MissingHAProxyError,
    NoFolderError,
    each_free_port,
    free_ports,
    home_and_token,
    is_free,
    make_own_folder,
    ray_folder,
    server_environment,
    with_switches,
)
from serve_app.middleware import server_edge
from serve_app.shipped_files import SHIPPED, parse_env, serve_variables
from tests.failing import failing
from tests.recording_proxy import recording_proxy

FOLDER = Path(FOLDER_PARENT, "raystream-12345678")
NOWHERE = "/dev/null/folder"
"""Nobody can make or write this folder, not even root."""


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


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_port_is_not_chosen_while_a_socket_or_a_connection_just_closed_has_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve listens without SO_REUSEADDR: the system refuses it such a port for a minute."""
    (port,) = free_ports(1)
    monkeypatch.setattr(server_environment_module, "CHOSEN_PORTS", range(port, port + 1))
    assert list(each_free_port()) == [port]
    with socket.create_server((address, port)) as server:
        client = socket.create_connection((address, port))
        connection, _ = server.accept()
        assert list(each_free_port()) == []
        connection.close()
        client.close()
    assert is_free(address, port)
    assert list(each_free_port()) == []


def test_variables_that_are_set_stay() -> None:
    own = {"RAY_SERVE_HAPROXY_STATS_PORT": "8404", LOOPBACK: "1", "HOME": "/root"}
    environment = server_environment(own, FOLDER)
    assert own.items() <= environment.items()


def test_relative_folders_stay_where_they_are_when_the_server_goes_to_its_file_s_folder() -> None:
    home, here = os.path.expanduser("~"), os.getcwd()
    given = {"PYTHONPATH": f"lib{os.pathsep}/opt", "HF_HOME": "~/hub", "TMPDIR": ""}
    environment = server_environment(given, FOLDER)
    assert environment["PYTHONPATH"] == f"{here}/lib{os.pathsep}/opt"
    assert environment["HF_HOME"] == f"{home}/hub"
    assert environment["TMPDIR"] == ""


def test_an_empty_home_is_none() -> None:
    assert server_environment({"HOME": ""}, FOLDER)["HOME"] != ""


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
        assert len(str(longest)) <= MAX_SOCKET_PATH


def test_the_longest_name_of_a_socket_of_ray_s_fits_below_its_folder() -> None:
    session = "session_2026-11-26_06-10-32_756711_4194304"
    names = f"/ray/{session}/sockets/plasma_store"
    assert len(names) <= RAY_NAMES
    with pytest.raises(NoFolderError, match="too long for the sockets below it"):
        ray_folder({"RAY_TMPDIR": "/".ljust(MAX_SOCKET_PATH - RAY_NAMES + 1, "t")})


def test_ray_s_folder_is_the_first_that_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_folder({}) == FOLDER_PARENT
    assert ray_folder({"TMPDIR": "/var/tmp"}) == "/var/tmp"
    assert ray_folder({"TMPDIR": NOWHERE}) == FOLDER_PARENT
    assert ray_folder({"TMPDIR": f"/{'long' * 20}"}) == FOLDER_PARENT
    assert server_environment({"TMPDIR": "/var/tmp"}, FOLDER)[RAY_FOLDER] == "/var/tmp"
    with pytest.raises(NoFolderError, match=r"can't be written: .*; set RAY_TMPDIR to a folder"):
        ray_folder({"RAY_TMPDIR": NOWHERE, "TMPDIR": "/var/tmp"})
    monkeypatch.setattr(server_environment_module, "FOLDER_PARENT", NOWHERE)
    assert ray_folder({"TMPDIR": "/var/tmp"}) == "/var/tmp"
    with pytest.raises(NoFolderError, match=f"{NOWHERE} can't be written: .*; set TMPDIR to"):
        ray_folder({})


def test_a_folder_of_ray_s_that_another_user_has_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_environment_module, "RAY_NAMES", 0)
    monkeypatch.setattr("os.access", lambda *_: False)
    (tmp_path / "ray").mkdir()
    with pytest.raises(NoFolderError, match="ray can't be written: it belongs to another user"):
        ray_folder({"RAY_TMPDIR": str(tmp_path)})


def test_a_server_s_own_folder_is_where_something_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = [make_own_folder({})]
    monkeypatch.setattr(server_environment_module, "FOLDER_PARENT", NOWHERE)
    made += [make_own_folder({"TMPDIR": "/var/tmp"}), make_own_folder({})]
    assert [str(each.parent) for each in made] == ["/tmp", "/var/tmp", "/dev/shm"]
    for each in made:
        assert each.stat().st_mode & 0o777 == 0o700
        assert len(f"{each}/{'f' * 56}/metrics.sock.4194304.tmp") <= MAX_SOCKET_PATH
        each.rmdir()


def test_without_a_home_that_can_be_written_ray_s_token_lies_in_the_server_s_own_folder(
    tmp_path: Path,
) -> None:
    home, own = tmp_path / "home", tmp_path / "own"
    own.mkdir()
    assert home_and_token({"HOME": str(home)}, own) == {}
    assert not list(own.iterdir())
    chosen = home_and_token({"HOME": NOWHERE}, own)
    assert chosen == {TOKEN_FILE: str(own / "auth_token")}
    assert len((own / "auth_token").read_text()) == 64
    assert home_and_token({"HOME": NOWHERE, "RAY_AUTH_TOKEN": "t" * 32}, own) == {}
    assert home_and_token({"HOME": NOWHERE, TOKEN_FILE: "/etc/token"}, own) == {}


def test_a_user_that_is_only_a_number_gets_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert home_and_token({}, tmp_path) == {"HOME": home}
    monkeypatch.setattr("pwd.getpwuid", failing(KeyError("getpwuid(): uid not found: 12345")))
    assert home_and_token({}, tmp_path) == {"HOME": str(tmp_path)}


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
