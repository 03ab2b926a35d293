"""What this machine knows of its running servers: a record in each server's own folder.

The supervisor of a server holds a lock in the folder that it makes (`server_environment`), as long
as it lives, and writes there what it runs; the driver of `raystream serve` adds where the server
answers. The lock, not a process id, says that a server lives: a killed supervisor loses it, and a
process in another container is not known by its number. Only folders of this user are read.
"""

import fcntl
import json
import os
import pwd
import re
import shlex
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import IO, Final
from urllib.parse import urlsplit

import psutil

from serve_app.commands.server_environment import (
    AUTH_MODE,
    FOLDER_PREFIXES,
    TOKEN,
    TOKEN_FILE,
    folder_parents,
)

DRIVER: Final = "serve_app.commands.run.driver"
DRIVERS: Final = {DRIVER, "serve_app.commands.driver"}
"""Its names; by the second, a server that was started before an update knows it."""

END_OF_OPTIONS: Final = "--"
"""What the names of a file or of models follow in the driver's command."""

LOCK: Final = "lock"
RECORD: Final = "server.json"
TOKEN_COPY: Final = "ray_token"
"""Holds Ray's token, if the environment had it and not a file."""

FOLDER: Final = re.compile(rf"(?:{'|'.join(FOLDER_PREFIXES)})[a-z0-9_]{{8}}")
"""The name of a server's folder, as `tempfile.mkdtemp` completes it."""


SAME_PROCESS_S: Final = 2.0
"""Least seconds between two processes with one number; the system's start is rounded to one."""


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A server of this user.

    Attributes:
        process_id: Its supervisor.
        process_created_s: When that process was created, which tells it from a later one; see
            `_created_s`.
        command: What it runs.
        file: The configuration that it serves; None until its driver has started Ray, and for
            models that were named to it.
        working_folder: Where relative paths in a file that it gets start; None until its driver
            has started Ray.
        url: Where it answers, without a slash at the end; None until then.
        api_url: Ray's API; None until then, and if Ray's dashboard does not run.
        token_file: The file with the token of Ray's API; None if Ray asks for none.
        ray_address: Where a program joins its Ray; None until that is known.
    """

    process_id: int
    process_created_s: float
    command: tuple[str, ...]
    file: str | None = None
    url: str | None = None
    api_url: str | None = None
    token_file: str | None = None
    ray_address: str | None = None
    working_folder: str | None = None

    @property
    def port(self) -> int | None:
        """The port where it answers; None until that is known."""
        return None if self.url is None else urlsplit(self.url).port

    @property
    def name(self) -> str:
        """What a user knows it by."""
        return f"{self.url or 'a server'} ({self.served})"

    @property
    def served(self) -> str:
        """The file that it serves, or the models or the command that it was started with."""
        if self.file is not None:
            return self.file
        if self.has_driver:
            return shlex.join(self.command[self.command.index(END_OF_OPTIONS) + 1 :])
        return shorten(shlex.join(self.command), 80)

    @property
    def has_driver(self) -> bool:
        """Whether its driver is that of `raystream serve`, which completes the record."""
        return not DRIVERS.isdisjoint(self.command) and END_OF_OPTIONS in self.command

    def is_process_here(self) -> bool:
        """Return whether its process is one of those that this process sees."""
        with suppress(psutil.Error):
            created_s = _created_s(psutil.Process(self.process_id))
            return abs(created_s - self.process_created_s) < SAME_PROCESS_S
        return False


@dataclass(frozen=True, slots=True)
class FoundServer:
    """A record, and where it was found.

    Attributes:
        folder: The server's own folder.
        record: What it says.
        is_alive: Whether its supervisor holds the lock.
    """

    folder: Path
    record: ServerRecord
    is_alive: bool


def _created_s(process: psutil.Process) -> float:
    """Return when a process was created, in seconds that no step of the clock changes.

    Linux counts them from the start of the system, and psutil adds when that was by today's clock.
    Elsewhere the system notes the time itself.
    """
    return process.create_time() - (psutil.boot_time() if sys.platform == "linux" else 0.0)


def hold_record(folder: Path, command: Sequence[str]) -> IO[bytes]:
    """Write the first record of a server, and lock it for as long as the returned file is open."""
    _write(folder, ServerRecord(os.getpid(), _created_s(psutil.Process()), tuple(command)))
    draft = folder / f"{LOCK}.new"
    lock = draft.open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    draft.replace(folder / LOCK)  # a reader finds it locked, or not at all
    return lock


def complete_record(
    environment: Mapping[str, str],
    file: Path | None,
    working_folder: Path,
    url: str,
    api_url: str | None,
    ray_address: str,
) -> None:
    """Add what the driver knows to the record of its supervisor; without one, do nothing.

    Args:
        environment: The server's variables, which say how Ray asks for its token.
        file: The configuration; None if it was composed for models.
        working_folder: See `ServerRecord`.
        url: See `ServerRecord`.
        api_url: See `ServerRecord`.
        ray_address: See `ServerRecord`.
    """
    if (own := supervising(environment)) is not None:
        token = _token_file(environment, own.folder)
        record = replace(
            own.record,
            file=None if file is None else str(file),
            working_folder=str(working_folder),
            url=url,
            api_url=api_url,
            token_file=None if token is None else str(token),
            ray_address=ray_address,
        )
        _write(own.folder, record)


def supervising(environment: Mapping[str, str]) -> FoundServer | None:
    """Return the server whose supervisor started this process; None without one.

    The number alone does not say so: a container that starts again gives the same ones.
    """
    for each in own_servers(environment):
        is_parent = each.record.process_id == os.getppid() and each.record.is_process_here()
        if is_parent and each.is_alive:
            return each
    return None


def note_file(server: FoundServer, file: Path) -> None:
    """Note that a server now serves another file."""
    _write(server.folder, replace(server.record, file=str(file)))


def _token_file(environment: Mapping[str, str], folder: Path) -> Path | None:
    if environment.get(AUTH_MODE) != "token":
        return None
    if token := environment.get(TOKEN):
        (folder / TOKEN_COPY).touch(mode=0o600)
        (folder / TOKEN_COPY).write_text(token, encoding="utf-8")
        return folder / TOKEN_COPY
    if file := environment.get(TOKEN_FILE):
        return Path(file).expanduser().absolute()
    return Path(environment.get("HOME", "~")).expanduser() / ".ray" / "auth_token"


def _write(folder: Path, record: ServerRecord) -> None:
    draft = folder / f"{RECORD}.new"
    draft.touch(mode=0o600)
    draft.write_text(json.dumps(asdict(record)), encoding="utf-8")
    draft.replace(folder / RECORD)


def own_servers(environment: Mapping[str, str]) -> list[FoundServer]:
    """Return this user's servers on this machine, those that were killed included."""
    found = []
    for folder in _folders(environment):
        with suppress(OSError, ValueError, TypeError):  # it ends just now, or is none of ours
            if folder.stat().st_uid == os.getuid() and (folder / LOCK).exists():
                told = json.loads((folder / RECORD).read_text(encoding="utf-8"))
                record = ServerRecord(**{**told, "command": tuple(told["command"])})
                found.append(FoundServer(folder, record, is_alive=is_held(folder)))
    return sorted(found, key=lambda each: (each.record.port or 0, each.record.process_created_s))


def other_users(environment: Mapping[str, str]) -> list[str]:
    """Return the names of other users who have folders like a server's, which may be left over."""
    owners = set()
    for folder in _folders(environment):
        with suppress(OSError, KeyError):
            owner = folder.stat().st_uid
            if owner != os.getuid():
                owners.add(pwd.getpwuid(owner).pw_name)
    return sorted(owners)


def is_held(folder: Path) -> bool:
    """Return whether a supervisor holds the lock of a folder."""
    try:
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _folders(environment: Mapping[str, str]) -> Iterator[Path]:
    for parent in dict.fromkeys(map(os.path.abspath, folder_parents(environment))):
        for folder in sorted(_entries(Path(parent))):
            if FOLDER.fullmatch(folder.name) and stat.S_ISDIR(folder.lstat().st_mode):
                yield folder


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
