"""The sockets on which a process and all its descendants wait for others."""

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# Ray names its processes after what they do; these start with the path of a program.
PROGRAMS = {
    "haproxy": "haproxy",
    "gcs_server": "gcs_server",
    "raylet": "raylet",
    "dashboard/dashboard.py": "dashboard",
    "autoscaler/_private/monitor.py": "monitor",
    "multiprocessing.forkserver": "dashboard",
    "serve_app.commands.run.driver": "driver",
}
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_MAY_ENTER = stat.S_IXGRP | stat.S_IXOTH


@dataclass(frozen=True, slots=True, order=True)
class TcpListener:
    """A listening TCP socket: the process in a few words, and its address."""

    process: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, order=True)
class UnixListener:
    """A bound Unix socket: the process in a few words, and the path."""

    process: str
    path: Path

    @property
    def is_private(self) -> bool:
        """Whether its mode, or that of a folder above it, keeps all other users out."""
        # HAProxy renames a socket after it has bound it, which the kernel does not show.
        path = Path(re.sub(r"\.\d+\.tmp$", "", str(self.path)))
        if not path.stat().st_mode & OTHERS_MAY_WRITE:
            return True
        return any(not folder.stat().st_mode & OTHERS_MAY_ENTER for folder in path.parents)


def name_of(process: psutil.Process) -> str:
    """Return what a process is, in the words of docs/security.md."""
    line = " ".join(process.cmdline())
    title = re.match(r"(ray::\w+)", line)
    if title is not None:
        return title[1]
    if line.startswith("ray-dashboard-"):
        return "dashboard"
    arguments = line.split()
    # A program of Ray's own is the first argument, a script of Python one of the next.
    for part, name in PROGRAMS.items():
        if any(part in argument for argument in arguments[:5]):
            return name
    return line


def _family(root: int) -> Iterator[tuple[str, psutil.Process]]:
    process = psutil.Process(root)
    for one in [process, *process.children(recursive=True)]:
        yield name_of(one), one


def tcp_listeners(root: int) -> list[TcpListener]:
    """Return the listening TCP sockets of a process and its descendants."""
    return [
        TcpListener(name, connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for name, process in _family(root)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def unix_listeners(root: int) -> list[UnixListener]:
    """Return the Unix sockets with a name of a process and its descendants."""
    return sorted(
        {
            UnixListener(name, Path(str(connection.laddr)))
            for name, process in _family(root)
            for connection in process.net_connections("unix")
            if connection.laddr
        }
    )
