"""The variables that a server gets: Serve's switches, and what keeps its sockets apart from others.

By default Ray listens on every interface, and HAProxy has fixed ports and a folder in /tmp that
all servers of the machine share. Variables that are already set stay as they are.

Source: ray.serve._private.constants, ray._private.ray_constants
"""

import os
import pwd
import random
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from errno import EADDRINUSE
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path

from serve_app.shipped_files import serve_variables

# Ports that Serve listens on in HAProxy's mode, besides that of `http_options`, by the variable
# that changes each. The last is bound with SO_REUSEPORT, so two servers on it would get each
# other's requests.
HAPROXY_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
}

# Where HAProxy's files and sockets lie, by variable. Ray puts a folder for the node in between.
HAPROXY_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}

CHOSEN_PORTS = range(20_000, 30_000)
"""Below the ports that the system gives to sockets that ask for any: HAProxy starts seconds later,
and one of Ray's own processes could get such a port first. Serve's replicas begin at 30,000.
"""

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, Ray's node has the address 127.0.0.1, and its processes listen only there.

That is Ray's default on Windows and macOS, and the variable works on Linux, too.
"""

AUTH_MODE = "RAY_AUTH_MODE"
"""Ray asks for its token by default, but warns about it unless the variable says so."""

PROXY_OF_GRPC = "grpc_proxy"
"""Empty, it keeps gRPC from asking the proxies of `http_proxy` and `https_proxy`.

Source: https://github.com/grpc/grpc/blob/master/doc/environment_variables.md
"""

DIRECT_HOSTS = ("localhost", "127.0.0.1", "::1", "169.254.169.254", "metadata.google.internal")
"""Where the parts of a server find each other, and where clouds tell Ray about this machine."""

SAFE_PATH = "PYTHONSAFEPATH"
"""With 1, no `python -m` or `python -c`, of which Ray starts some, imports a module of the working
directory in place of an installed one.
"""

TOKEN = "RAY_AUTH_TOKEN"
TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"
"""Ray's token, and the file of it. Without both it is ~/.ray/auth_token, made if it is missing."""

FOLDER_PARENT = "/tmp"
"""Where a server's own folder lies, unless nothing can be written there."""

FOLDER_PREFIXES = ("raystream-", "rs-")
"""How the name of that folder begins; the second is for long paths."""

RAY_FOLDER = "RAY_TMPDIR"
"""Names the folder below which Ray puts `ray`, with its logs and sockets; else TMPDIR does, or it
is /tmp.
"""

FOLDERS = ("HF_HOME", "PYTHONPATH", "TMPDIR", TOKEN_FILE)
"""Variables whose paths may be relative; PYTHONPATH has several."""

MAX_SOCKET_PATH = 107
"""The most bytes of the path of a Unix socket."""

HAPROXY_NAMES = 82
"""Most bytes of Ray's names below a server's own folder: the node, a socket, a process id."""

RAY_NAMES = 70
"""Most bytes of Ray's names below its folder: the session with its process id, a socket."""

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
HAPROXY_BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
OUR_HAPROXY = "raystream-haproxy"

MIDDLEWARE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
SERVER_EDGE = "serve_app.middleware.server_edge:server_edge"
"""The value of MIDDLEWARE in serve.env."""


class MissingHAProxyError(Exception):
    """HAProxy is to be used, and its program is missing; the text says what to do."""


class NoFolderError(Exception):
    """There is no folder for a server's sockets and logs; the text says what to set."""


def make_own_folder(environment: Mapping[str, str]) -> Path:
    """Make a server's own folder, which only its user can read: HAProxy's files lie there.

    Raises:
        NoFolderError: Nowhere can it be.
    """
    reasons = []
    for parent in folder_parents(environment):
        for prefix in FOLDER_PREFIXES:
            longest = MAX_SOCKET_PATH - HAPROXY_NAMES - len(f"/{prefix}12345678")
            if (reason := _why_not(parent, longest)) is None:
                return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        reasons.append(reason)
    raise NoFolderError(f"{'; '.join(map(str, reasons))}; set TMPDIR to a folder such as /var/tmp")


def folder_parents(environment: Mapping[str, str]) -> list[str]:
    """Return where a server's own folder may lie, the first choice first."""
    return [each for each in (FOLDER_PARENT, environment.get("TMPDIR"), "/dev/shm") if each]


def ray_folder(environment: Mapping[str, str]) -> str:
    """Return the folder for Ray's: the one that is named, or else the first that will do.

    Raises:
        NoFolderError: Nothing can be written to it, or its path is too long.
    """
    named = environment.get(RAY_FOLDER)
    reasons = []
    for folder in (named,) if named else filter(None, (environment.get("TMPDIR"), FOLDER_PARENT)):
        longest = MAX_SOCKET_PATH - RAY_NAMES
        reason = _why_not(folder, longest)
        below = Path(folder, "ray")
        if reason is None and below.is_dir() and not os.access(below, os.W_OK):
            reason = f"{below} can't be written: it belongs to another user"
        if reason is None:
            return folder
        reasons.append(reason)
    variable = RAY_FOLDER if named else "TMPDIR"
    raise NoFolderError(
        f"{'; '.join(reasons)}; set {variable} to a folder that this user can write, of at most "
        f"{longest} bytes"
    )


def home_and_token(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return what stands in for a home that is missing, or to which nothing can be written.

    Ray keeps its API's token below the home. Where it can't, the token lies in the server's own
    folder, and so does the home of a user without one; both end with the server.

    Args:
        environment: The variables that are set.
        folder: The server's own folder.
    """
    home = Path(environment.get("HOME") or _home_of_user() or folder)
    own = {} if environment.get("HOME") else {"HOME": str(home)}
    token = home / ".ray" / "auth_token"
    if not (
        any(environment.get(variable) for variable in (TOKEN, TOKEN_FILE))
        or os.access(token, os.R_OK)
        or _can_make(token)
    ):
        file = folder / "auth_token"
        file.write_text(secrets.token_hex(32), encoding="utf-8")
        own[TOKEN_FILE] = str(file)
    return own


def _home_of_user() -> str | None:
    """Return the home that the system knows; None for a user that is only a number."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None


def _can_make(file: Path) -> bool:
    """Return whether a file, and the folders that it lacks, could be made."""
    there = next(str(parent) for parent in file.parents if os.path.exists(parent))
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)


def _why_not(folder: str, longest: int) -> str | None:
    """Return why nothing can be put into a folder; None if it can."""
    if len(os.fsencode(folder)) > longest:
        return f"{folder} is too long for the sockets below it"
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"{folder} can't be written: {error.strerror}"
    return None


def hiding_module(folder: Path) -> str | None:
    """Return the file of a folder that Python would import in place of one of our packages."""
    own = Path(__file__).parents[2]
    for name in ("deployments", "serve_app"):
        found = PathFinder.find_spec(name, [str(folder)])
        if found is not None and found.origin and Path(found.origin).parents[1] != own:
            return found.origin
    return None


def with_switches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the variables of serve.env, and the path of our HAProxy.

    Serve's own proxy stands in where our HAProxy is not found: Ray's configuration of HAProxy is
    not safe (see `haproxy`).

    Raises:
        MissingHAProxyError: The environment asks for HAProxy, and its program is missing.
    """
    switches = serve_variables()
    beside = Path(sys.executable).with_name(OUR_HAPROXY)
    haproxy = str(beside) if beside.is_file() else shutil.which(OUR_HAPROXY)
    if haproxy is None:
        switches[HAPROXY] = "0"
    else:
        switches[HAPROXY_BINARY] = haproxy
    chosen = {**switches, **environment}
    binary = chosen.get(HAPROXY_BINARY, "")
    if chosen[HAPROXY] == "1" and not Path(binary).is_file():
        raise MissingHAProxyError(
            f"{HAPROXY} is 1, but {binary or OUR_HAPROXY} is missing: install it, unset "
            f"{HAPROXY_BINARY}, or set {HAPROXY}=0"
        )
    return chosen


def server_environment(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment for a server whose HAProxy keeps its files in this folder.

    Its parts call each other directly, whatever proxies the environment names; a download from the
    hub still goes through them.

    Raises:
        NoFolderError: There is no folder for Ray's files.
    """
    unset = [variable for variable in HAPROXY_PORTS if variable not in environment]
    ports = map(str, free_ports(len(unset)))
    files = {variable: str(folder / name) for variable, name in HAPROXY_FILES.items()}
    own = {
        LOOPBACK: "0",
        AUTH_MODE: "token",
        SAFE_PATH: "1",
        **files,
        **dict(zip(unset, ports, strict=True)),
    }
    forced = {
        **_absolute(environment),
        **_direct_calls(environment),
        **home_and_token(environment, folder),
        RAY_FOLDER: os.path.abspath(ray_folder(environment)),
    }
    return {**own, **environment, **forced}


def _absolute(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of folders, from this working directory: the driver goes elsewhere."""
    return {
        variable: os.pathsep.join(
            os.path.abspath(os.path.expanduser(path)) for path in folders.split(os.pathsep)
        )
        for variable in FOLDERS
        if (folders := environment.get(variable))
    }


def _direct_calls(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which calls inside a server never go through a proxy."""
    # Programs prefer the lower case; what the user has set stays in effect for other hosts.
    given = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = list(filter(None, (host.strip() for host in given.split(","))))
    if "*" not in hosts:  # every host, which some programs read only where it stands alone
        hosts += [host for host in DIRECT_HOSTS if host not in hosts]
    direct = ",".join(hosts)
    return {PROXY_OF_GRPC: "", "no_proxy": direct, "NO_PROXY": direct}


def is_free(host: str, port: int, *, has_reuse: bool = True) -> bool:
    """Return whether a server could listen there.

    `has_reuse` is whether it sets SO_REUSEADDR, as most do: a port whose connections were closed
    within the last minute is free for it, and taken for others.

    Raises:
        OSError: Not because of another program: the host is not this machine's, or the port is not
            for this user.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, has_reuse)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == EADDRINUSE:
                return False
            raise
        return True


def each_free_port() -> Iterator[int]:
    """Yield ports that no socket has at any address, and that the system gives to none by itself.

    Serve's servers of HTTP set no SO_REUSEADDR.
    """
    # Not by the common generator: a seed would give several processes the same ports.
    candidates = random.SystemRandom().sample(CHOSEN_PORTS, len(CHOSEN_PORTS))
    return (port for port in candidates if is_free("0.0.0.0", port, has_reuse=False))


def free_ports(num_ports: int) -> list[int]:
    """Return some of `each_free_port`."""
    return list(islice(each_free_port(), num_ports))
