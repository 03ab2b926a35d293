import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from serve_app.commands.run import server_record
from serve_app.commands.run.server_record import (
    LOCK,
    RECORD,
    complete_record,
    hold_record,
    is_held,
    note_file,
    other_users,
    own_servers,
)

NAME = "raystream-a1b2c3d4"


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let servers have their folders here only, and this process be its own driver's parent."""
    monkeypatch.setattr(server_record, "folder_parents", lambda environment: [str(tmp_path)])
    monkeypatch.setattr(os, "getppid", os.getpid)
    (tmp_path / NAME).mkdir(mode=0o700)
    return tmp_path


def test_a_server_is_found_while_its_supervisor_holds_the_lock(parent: Path) -> None:
    with hold_record(parent / NAME, ["serve", "run", "f.yaml"]):
        (found,) = own_servers({})
        assert (found.folder, found.is_alive) == (parent / NAME, True)
        assert found.record.name == "a server (serve run f.yaml)"
        assert found.record.is_process_here()
    (found,) = own_servers({})
    assert not found.is_alive


@pytest.mark.skipif(sys.platform != "linux", reason="psutil adds the start of the system there")
def test_a_process_is_known_after_a_step_of_the_clock(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold_record(parent / NAME, []):
        boot_s = psutil.boot_time()
        for module in ("psutil._pslinux", "psutil._psplatform", "psutil"):
            monkeypatch.setattr(f"{module}.boot_time", lambda: boot_s - 3600)
        assert psutil.Process().create_time() < time.time() - 3000
        assert own_servers({})[0].record.is_process_here()


def test_the_lock_is_not_inherited_by_what_the_supervisor_starts(parent: Path) -> None:
    with hold_record(parent / NAME, []):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not is_held(parent / NAME)
    child.communicate(b"\n")


def test_the_driver_adds_where_the_server_answers_and_the_file_of_the_token(parent: Path) -> None:
    environment = {"RAY_AUTH_MODE": "token", "HOME": "/home/ann"}
    with hold_record(parent / NAME, []):
        complete_record(
            environment,
            Path("/f.yaml"),
            Path("/"),
            "https://[::1]:8443/llm",
            "http://127.0.0.1:1",
            "h:2",
        )
        (found,) = own_servers({})
        record = found.record
        assert record.name == "https://[::1]:8443/llm (/f.yaml)"
        assert (record.port, record.api_url) == (8443, "http://127.0.0.1:1")
        assert record.ray_address == "h:2"
        assert record.token_file == "/home/ann/.ray/auth_token"
        note_file(found, Path("/g.yaml"))
        assert own_servers({})[0].record.file == "/g.yaml"


@pytest.mark.parametrize(
    ("environment", "file"),
    [
        ({}, None),
        ({"RAY_AUTH_MODE": "disabled", "HOME": "/h"}, None),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/t"}, "/t"),
    ],
)
def test_where_the_token_lies_depends_on_the_environment(
    environment: dict[str, str], file: str | None, parent: Path
) -> None:
    with hold_record(parent / NAME, []):
        complete_record(environment, Path("/f.yaml"), Path("/"), "http://h:1", None, "h:2")
        assert own_servers({})[0].record.token_file == file


def test_a_token_of_the_environment_is_kept_where_only_this_user_can_read(parent: Path) -> None:
    with hold_record(parent / NAME, []):
        complete_record(
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret"},
            Path("/f"),
            Path("/"),
            "http://h:1",
            None,
            "h:2",
        )
        file = Path(own_servers({})[0].record.token_file or "")
        assert (file.parent, file.read_text()) == (parent / NAME, "secret")
        assert file.stat().st_mode & 0o077 == 0


def test_a_driver_without_a_supervisor_has_no_record(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold_record(parent / NAME, []):
        monkeypatch.setattr(os, "getppid", lambda: 1)
        complete_record({}, Path("/f.yaml"), Path("/"), "http://h:1", None, "h:2")
        assert own_servers({})[0].record.url is None


@pytest.mark.parametrize("is_held_elsewhere", [False, True])
def test_a_driver_writes_into_no_other_server_s_record_that_has_its_parent_s_number(
    parent: Path, is_held_elsewhere: bool
) -> None:
    other = parent / "raystream-00000000"  # which is read first
    other.mkdir()
    with ExitStack() as stack:
        lock = stack.enter_context(hold_record(other, ["serve", "run", "old.yaml"]))
        told = json.loads((other / RECORD).read_text())
        (other / RECORD).write_text(json.dumps(told | {"process_created_s": -9.0}))
        if not is_held_elsewhere:  # its supervisor was killed
            lock.close()
            (other / RECORD).write_text(json.dumps(told))
        stack.enter_context(hold_record(parent / NAME, []))
        complete_record({}, Path("/f.yaml"), Path("/"), "http://h:1", None, "h:2")
        assert {each.folder: each.record.url for each in own_servers({})} == {
            other: None,
            parent / NAME: "http://h:1",
        }


def test_a_folder_of_another_user_is_named_and_not_read(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold_record(parent / NAME, []):
        assert other_users({}) == []
        monkeypatch.setattr(os, "getuid", lambda: 1)
        assert own_servers({}) == []
        assert len(other_users({})) == 1


def test_what_is_no_server_s_folder_is_left_alone(parent: Path) -> None:
    (parent / "raystream-abc").mkdir()
    (parent / "raystream-abcdefgh").symlink_to(parent)
    (parent / NAME / LOCK).touch()  # and no record, as while it is made
    assert own_servers({}) == []
