"""The checks that `raystream serve` runs before it starts Ray.

It checks the file as `raystream check` does. Then it checks that the host is this machine's, that
the server's port is free, that HAProxy's mode can serve the file, and that the ports are free that
variables set for this mode, because Serve reports all that late and verbosely.
"""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import psutil
import yaml
from ray.serve.schema import HTTPOptionsSchema, ServeDeploySchema

from serve_app.commands.check import BUILDER, check_file, place
from serve_app.commands.ray_check import host_problem
from serve_app.commands.server_environment import HAPROXY, HAPROXY_PORTS, is_free
from serve_app.config import AppConfig
from serve_app.keys.api_keys import ApiKeysError, load_api_keys
from serve_app.shipped_files import SHIPPED


def passes(name: str) -> bool:
    """Check a file and the ports that it needs; write what is wrong to standard error."""
    if not check_file(name):
        return False
    text = Path(name).read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    http = ServeDeploySchema.model_validate(document).http_options
    with chdir(Path(name).parent):  # from which relative paths in the file start
        found = (*address_problems(http), *certificate_problems(http))
        wrong = [f"{place(name, text, each)}: {each}\n" for each in found]
        if problems := [*wrong, *([] if wrong else haproxy_problems(http))]:
            sys.stderr.writelines(problems)
            return False
        application = next(a for a in document["applications"] if a["import_path"] == BUILDER)
        try:
            load_api_keys(AppConfig.model_validate(application["args"]).auth, SHIPPED)
        except ApiKeysError as error:
            sys.stderr.write(f"{name}: {error}\n")
            return False
    return True


def address_problems(http: HTTPOptionsSchema) -> Iterator[str]:
    """Yield why this machine can't listen on the host and port of a file; nothing if it can."""
    try:
        problem = _port_problem(http.host, http.port)
    except OSError:  # an address of another machine, an unknown name, no IPv6
        yield (
            f"http_options.host: {http.host!r} is no address of this machine, which has "
            f"{', '.join(own_addresses())}"
        )
    else:
        if problem is not None:
            yield f"http_options.port: {problem}"


def _port_problem(host: str, port: int) -> str | None:
    try:
        if is_free(host, port):
            return None
    except PermissionError:
        return f"the system lets only its administrator listen on {port}; choose one from 1024 on"
    return (
        f"{port} is in use on {host}; stop the program that uses it, perhaps another server, or "
        "choose another port"
    )


def certificate_problems(http: HTTPOptionsSchema) -> Iterator[str]:
    """Yield which files for HTTPS are not on this machine."""
    for key in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        file = getattr(http, key)
        if file is not None and not Path(file).is_file():
            yield f"http_options.{key}: {file!r} is no file"


def own_addresses() -> list[str]:
    """Return the machine's addresses on which a server can listen."""
    found = [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [address for address in found if host_problem(address) is None]


def haproxy_problems(http: HTTPOptionsSchema) -> Iterator[str]:
    """Yield a line for each setting with which HAProxy's mode can't serve."""
    if not _has_haproxy():
        return
    # Serve's replicas would speak TLS, but HAProxy speaks plain HTTP to them and to clients.
    if http.ssl_certfile is not None:
        yield (
            "http_options.ssl_certfile: HAProxy's mode has no HTTPS; put a proxy with TLS in "
            "front of the server, or leave RAY_SERVE_ENABLE_HA_PROXY out\n"
        )
    # `raystream serve` has set those that the user has not, to free ports.
    for variable in filter(os.environ.__contains__, HAPROXY_PORTS):
        own = os.environ[variable]
        if not _is_port(own):
            yield f"{variable}: {own!r} is not a port, a number from 1 to 65535\n"
        elif int(own) == http.port:
            yield f"{variable}: {own} is http_options.port, too; choose another port\n"
        elif (problem := _port_problem(http.host, int(own))) is not None:
            yield f"{variable}: {problem}\n"


def _has_haproxy() -> bool:
    return os.environ.get(HAPROXY) == "1"


def _is_port(value: str) -> bool:
    return value.isascii() and value.isdecimal() and 0 < int(value) < 2**16
