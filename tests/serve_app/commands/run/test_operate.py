import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.commands.check.compose import BUILDER
from serve_app.commands.run import operate, server_record
from serve_app.commands.run.operate import OperateError, with_absolute_paths
from serve_app.commands.run.server_record import complete_record, hold_record, own_servers
from tests.threaded_server import answering

ROOT = Path(__file__).resolve().parents[4]
TOKEN = "the-token"


class FakeApi(ThreadingHTTPServer):
    """Ray's API of one server: a PUT deploys at once, or as a script says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.put: list[Any] = []
        self.after_put: list[dict[str, Any]] = []
        self.details = details("RUNNING", 1.0)
        self.body = b""
        self.is_deploying = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: FakeApi

    def do_GET(self) -> None:  # http.server's name
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer(401, b"Unauthorized: wrong token")
            return
        if self.server.is_deploying and self.server.after_put:
            self.server.details = self.server.after_put.pop(0)
            self.server.is_deploying = bool(self.server.after_put)
        self.answer(200, self.server.body or json.dumps(self.server.details).encode())

    def do_PUT(self) -> None:  # http.server's name
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        length = int(self.headers["Content-Length"])
        self.server.put.append(json.loads(self.rfile.read(length)))
        self.server.is_deploying = True
        self.answer(200, b"")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


def details(status: str, deployed_s: float, /, **chat: Any) -> dict[str, Any]:
    deployment = {"status": "HEALTHY", "message": "", "replicas": [{"state": "RUNNING"}], **chat}
    application = {
        "status": status,
        "message": "",
        "last_deployed_time_s": deployed_s,
        "deployments": {"pydoc-chat": deployment},
    }
    return {
        "http_options": {"host": "127.0.0.1", "port": 8000, "root_path": ""},
        "applications": {"raystream": application},
    }


class Machine:
    """Servers of this user in a folder of the test's; `told` is what a command writes."""

    def __init__(self, parent: Path, api: FakeApi, stack: ExitStack) -> None:
        self.parent = parent
        self.api = api
        self.told: list[str] = []
        self._stack = stack

    def hold(self, folder: Path, command: Sequence[str]) -> None:
        self._stack.enter_context(hold_record(folder, command))

    def end(self) -> None:
        self._stack.close()

    def run(self, file: Path = Path("/a.yaml")) -> None:
        """Add a server at the shipped port, of which the API tells."""
        self.add("aaaaaaaa", "http://127.0.0.1:8000", file, self.api)

    def deploy(self, folder: str = "a", **changes: Any) -> None:
        operate.deploy(shipped(self.parent / folder, **changes), self.told.append, {})

    def add(
        self,
        name: str,
        url: str,
        file: Path | None,
        api: FakeApi | None,
        command: Sequence[str] = ("driver", "f.yaml"),
    ) -> None:
        folder = self.parent / f"raystream-{name}"
        folder.mkdir(mode=0o700)
        self.hold(folder, command)
        token = self.parent / "token"
        token.write_text(f"{TOKEN}\n")
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        # The records of this process's other servers are complete already.
        mine = [each for each in own_servers({}) if each.folder == folder]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server_record, "own_servers", lambda _: mine)
            api_url = None if api is None else api.url
            working_folder = Path("/") if file is None else file.parent
            complete_record(environment, file, working_folder, url, api_url, "h:2")


@pytest.fixture
def api() -> Iterator[FakeApi]:
    server = FakeApi()
    with answering(server):
        yield server


@pytest.fixture
def machine(tmp_path: Path, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(server_record, "folder_parents", lambda environment: [str(tmp_path)])
    monkeypatch.setattr(os, "getppid", os.getpid)
    monkeypatch.setattr(operate, "POLL_S", 0.001)
    with ExitStack() as stack:
        yield Machine(tmp_path, api, stack)


def shipped(folder: Path, *, source: str = "", auth: object = None, **http: object) -> Path:
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    document["http_options"] |= http
    args = document["applications"][0]["args"]
    if source:
        args["models"][0]["source"] = source
    if auth:
        args["auth"] = auth
    folder.mkdir(exist_ok=True)
    file = folder / "serve_config.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def test_without_a_server_each_command_says_so(machine: Machine) -> None:
    assert not operate.status(machine.told.append, {})
    assert machine.told == [
        "No server of yours runs on this machine; start one by: raystream serve"
    ]
    with pytest.raises(OperateError, match=r"^no server of yours runs on this machine$"):
        operate.stop(None, machine.told.append, {})
    with pytest.raises(
        OperateError, match=r"no server of yours runs .*`raystream serve .*` starts"
    ):
        machine.deploy()


def test_the_status_shows_each_server_and_what_serve_tells_of_it(machine: Machine) -> None:
    machine.run()
    machine.add("bbbbbbbb", "http://127.0.0.1:8001", Path("/b.yaml"), None)
    machine.api.details = details(
        "DEPLOYING",
        1.0,
        status="UPDATING",
        message="Traceback\n  File x\nOSError: the disk is full\n",
        replicas=[{"state": "STARTING"}, {"state": "RUNNING"}, {"state": "RUNNING"}],
    )
    assert operate.status(machine.told.append, {})
    assert machine.told == [
        f"http://127.0.0.1:8000 (/a.yaml), process {os.getpid()}",
        "  raystream: DEPLOYING",
        "    pydoc-chat: UPDATING (1 starting, 2 running) OSError: the disk is full",
        f"http://127.0.0.1:8001 (/b.yaml), process {os.getpid()}",
        "  http://127.0.0.1:8001: Ray's dashboard does not run, and with it its API",
    ]


def test_a_server_that_was_killed_is_named_once_and_its_folder_removed(machine: Machine) -> None:
    folder = machine.parent / "raystream-cccccccc"
    folder.mkdir()
    hold_record(folder, ["driver", "f.yaml"]).close()
    assert not operate.status(machine.told.append, {})
    assert machine.told[0] == f"a server (driver f.yaml) was killed; its folder {folder} is removed"
    assert not folder.exists()


def test_a_server_whose_driver_has_not_told_where_it_answers_is_starting_or_supervised(
    machine: Machine,
) -> None:
    for name, command in (("a", [server_record.DRIVER, "--", "f"]), ("b", ["serve", "run", "g"])):
        folder = machine.parent / f"raystream-{name * 8}"
        folder.mkdir()
        machine.hold(folder, command)
    assert operate.status(machine.told.append, {})
    assert machine.told[1::2] == [
        "  it is still starting Ray",
        "  `raystream supervise` runs it: Ray's own commands reach it",
    ]


def test_another_user_s_server_is_named_as_theirs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.add("aaaaaaaa", "http://127.0.0.1:8000", Path("/a.yaml"), None)
    monkeypatch.setattr(os, "getuid", lambda: 1)
    assert not operate.status(machine.told.append, {})
    assert machine.told[-1].startswith("Servers of others (")


def test_a_file_goes_to_the_server_that_has_its_port_and_is_waited_for(machine: Machine) -> None:
    file = shipped(machine.parent / "a")
    machine.add("bbbbbbbb", "http://127.0.0.1:8001", Path("/b.yaml"), None)
    machine.run(file.with_name("old.yaml"))
    machine.api.after_put = [
        details("RUNNING", 1.0),  # Serve has not begun
        details("DEPLOYING", 2.0, status="UPDATING"),
        details("RUNNING", 2.0),
    ]
    operate.deploy(file, machine.told.append, {})
    assert machine.api.put == [yaml.safe_load(file.read_text())]
    assert machine.api.after_put == []
    assert machine.told[-1].endswith(" s: http://127.0.0.1:8000")
    assert {each.record.file for each in own_servers({})} == {"/b.yaml", str(file)}


def test_a_failed_deploy_ends_with_serve_s_reason(machine: Machine) -> None:
    file = shipped(machine.parent / "a")
    machine.run(file)
    failed = {"status": "DEPLOY_FAILED", "message": "Traceback\nValueError: no such model"}
    machine.api.after_put = [details("DEPLOY_FAILED", 2.0, **failed)]
    with pytest.raises(
        OperateError, match=r"^raystream: DEPLOY_FAILED: ValueError: no such model$"
    ):
        operate.deploy(file, machine.told.append, {})


def test_a_file_for_no_server_s_port_or_with_another_host_is_sent_nowhere(machine: Machine) -> None:
    machine.run()
    with pytest.raises(OperateError, match=r"no server of yours has the port 8001 of .*; there is"):
        machine.deploy("b", port=8001)
    with pytest.raises(OperateError, match=r"can't change: host \('127\.0\.0\.1' now\)"):
        machine.deploy("b", host="0.0.0.0")
    machine.api.details["http_options"] |= {
        "request_timeout_s": 9.0,
        "ssl_keyfile_password": "secret",
    }
    with pytest.raises(OperateError, match=r"request_timeout_s \(9\.0 now\)") as missing:
        machine.deploy("b")
    assert "secret" not in str(missing.value)
    assert machine.api.put == []


def test_a_port_in_quotes_is_a_port(machine: Machine) -> None:
    machine.run()
    machine.api.after_put = [details("RUNNING", 2.0)]
    machine.deploy(port="8000")
    assert len(machine.api.put) == 1


def test_a_wrong_token_is_told_in_ray_s_words(machine: Machine) -> None:
    machine.run()
    (machine.parent / "token").write_text("another")
    operate.status(machine.told.append, {})
    assert machine.told[1] == f"  Ray's API at {machine.api.url} refuses: Unauthorized: wrong token"


def test_relative_paths_of_a_file_elsewhere_become_absolute(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "keys.yaml").touch()
    args: Mapping[str, Any] = {
        "models": [
            {"id": "a", "source": "mine"},
            {"id": "b", "source": "org/b"},
            {"id": "c", "source": "models/pydoc-chat"},
            {"id": "d", "source": "mine", "engine": "vllm", "engine_python": "envs/v"},
        ],
        "auth": {"api_keys_file": "keys.yaml"},
    }
    others = {"import_path": "a:b", "args": {"models": ["gpt"]}}
    document = {"applications": [{"import_path": BUILDER, "args": args}, others]}
    found = with_absolute_paths(document, tmp_path)["applications"][0]["args"]
    assert [model["source"] for model in found["models"]] == [
        str(tmp_path / "mine"),
        "org/b",
        str(ROOT / "models/pydoc-chat"),
        str(tmp_path / "mine"),
    ]
    assert [model.get("engine_python") for model in found["models"]] == [
        *(None, None, None),
        str(tmp_path / "envs/v"),
    ]
    assert found["auth"]["api_keys_file"] == str(tmp_path / "keys.yaml")
    assert args["models"][0]["source"] == "mine"


def test_a_file_of_another_folder_is_sent_with_absolute_paths_each_time(machine: Machine) -> None:
    for name in ("a", "b"):
        (machine.parent / name / "mine").mkdir(parents=True)
    machine.run(machine.parent / "a/serve_config.yaml")
    for num, name in enumerate(("b", "b", "a"), 2):
        machine.api.after_put = [details("RUNNING", num)]
        machine.deploy(name, source="mine")
    sent = [each["applications"][0]["args"]["models"][0]["source"] for each in machine.api.put]
    assert sent == [str(machine.parent / "b/mine"), str(machine.parent / "b/mine"), "mine"]


KEY = {"name": "default", "sha256": "0" * 64, "scopes": ["operate"]}


def test_a_file_without_keys_does_not_open_a_server_that_asks_for_one(machine: Machine) -> None:
    machine.run()
    started_with = {"import_path": BUILDER, "args": {"auth": {"api_keys": [KEY]}}}
    running = details("RUNNING", 1.0)
    running["applications"]["raystream"]["deployed_app_config"] = started_with
    machine.api.details = running
    machine.api.after_put = [details("RUNNING", 2.0)]
    with pytest.raises(OperateError, match=r"asks for keys, and .* has none: write `auth: (.*)` u"):
        machine.deploy()
    assert machine.api.put == []
    machine.deploy(auth={"api_keys": [KEY]})
    machine.api.details = running
    machine.api.after_put = [details("RUNNING", 3.0)]
    machine.deploy(auth={"allow_anonymous": True})
    assert len(machine.api.put) == 2


def test_what_no_json_holds_is_named_before_anything_is_sent(machine: Machine) -> None:
    machine.run()
    file = shipped(machine.parent / "a")
    document = yaml.safe_load(file.read_text())
    for env_vars, message in (
        ({"SINCE": date(2026, 1, 2)}, r"2026-01-02 is a date, not text; write it in quotes"),
        ({date(2026, 1, 2): "x"}, r"write each key in quotes"),
    ):
        document["applications"][0]["runtime_env"] = {"env_vars": env_vars}
        file.write_text(yaml.safe_dump(document))
        with pytest.raises(OperateError, match=message):
            operate.deploy(file, machine.told.append, {})
    assert machine.api.put == []


def test_what_answers_without_json_is_not_taken_for_ray_s_api(machine: Machine) -> None:
    machine.run()
    for body in (b"<html>", b"[]", b"\xff"):
        machine.api.body = body
        operate.status(machine.told.append, {})
        assert machine.told[-1] == f"  what answers at {machine.api.url} is not Ray's API"


@pytest.mark.parametrize("driver", [server_record.DRIVER, "serve_app.commands.driver"])
def test_a_server_is_named_by_the_models_that_it_was_started_with(
    machine: Machine, driver: str
) -> None:
    command = [sys.executable, "-m", driver, "--port=8001", "--", "org/a", "/m/b"]
    machine.add("aaaaaaaa", "http://127.0.0.1:8001", None, machine.api, command)
    assert operate.status(machine.told.append, {})
    assert machine.told[0].startswith("http://127.0.0.1:8001 (org/a /m/b), process ")


def test_a_server_that_ends_just_before_it_is_stopped_is_stopped(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.add("aaaaaaaa", "http://127.0.0.1:8000", Path("/a.yaml"), None)

    def kill(process_id: int, signal: int) -> None:
        machine.end()
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    operate.stop(None, machine.told.append, {})
    assert machine.told[-1] == "Stopped."


SUPERVISOR = """
import os, signal, sys
from pathlib import Path
from serve_app.commands.run.server_record import complete_record, hold_record
folder = Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
os.getppid = os.getpid  # it is its own driver, too
with hold_record(folder, ["driver"]):
    environment = {"TMPDIR": str(folder.parent)}
    complete_record(environment, folder, folder, "http://127.0.0.1:8004", None, "h:2")
    print(flush=True)
    signal.pause()
"""


def test_a_server_is_stopped_by_its_supervisor_and_waited_for(machine: Machine) -> None:
    machine.add("aaaaaaaa", "http://127.0.0.1:8000", Path("/a.yaml"), None)
    folder = machine.parent / "raystream-dddddddd"
    folder.mkdir(mode=0o700)
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(folder)], stdout=subprocess.PIPE, cwd=ROOT
    ) as supervisor:
        assert supervisor.stdout is not None
        supervisor.stdout.readline()
        with pytest.raises(OperateError, match="2 servers of yours run; name one by --port: "):
            operate.stop(None, machine.told.append, {})
        with pytest.raises(OperateError, match=r"no server of yours has the port 1; there is "):
            operate.stop(1, machine.told.append, {})
        operate.stop(8004, machine.told.append, {})
        assert supervisor.wait(10) == 0
    assert machine.told[-1] == "Stopped."


def test_a_server_in_another_namespace_is_not_signalled(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.add("aaaaaaaa", "http://127.0.0.1:8000", Path("/a.yaml"), None)
    monkeypatch.setattr("psutil.Process.create_time", lambda self: 0.0)
    with pytest.raises(OperateError, match="another container or namespace: stop it there"):
        operate.stop(None, machine.told.append, {})
