"""The checks that `raystream serve` runs before it starts Ray.

It checks the file as `raystream check` does. Then it checks that HAProxy's mode can serve it, that
the server's port is free, and so are the ports that variables set for HAProxy's mode, because Serve
reports a port in use late and verbosely.
"""

import os
import sys
from collections.abc import Iterator

import yaml
from ray.serve.schema import HTTPOptionsSchema, ServeDeploySchema

from serve_app.commands.check import BUILDER, check_file
from serve_app.commands.server_environment import HAPROXY, HAPROXY_PORTS, is_free
from serve_app.config import AppConfig
from serve_app.keys.api_keys import ApiKeysError, load_api_keys
from serve_app.shipped_files import SHIPPED


def passes(name: str) -> bool:
    """Check a file and the ports that it needs; write what is wrong to standard error."""
    if not check_file(name):
        return False
    with open(name, encoding="utf-8") as file:
        document = yaml.safe_load(file)
    http = ServeDeploySchema.model_validate(document).http_options
    if problems := [*haproxy_problems(http), *taken_ports(name, http.host, http.port)]:
        sys.stderr.writelines(problems)
        return False
    application = next(a for a in document["applications"] if a["import_path"] == BUILDER)
    try:
        load_api_keys(AppConfig.model_validate(application["args"]).auth, SHIPPED)
    except ApiKeysError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return False
    return True


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
    for variable in _port_variables():
        if not _is_port(os.environ[variable]):
            yield f"{variable}: {os.environ[variable]!r} is not a port, a number from 1 to 65535\n"


def taken_ports(name: str, host: str, port: int) -> Iterator[str]:
    """Yield a line for each port that the server needs but another program uses."""
    if not is_free(host, port):
        yield (
            f"{name}: http_options.port: {port} is in use on {host}; "
            "stop the program that uses it, or choose another port\n"
        )
    for variable in _port_variables() if _has_haproxy() else ():
        own = os.environ[variable]
        if _is_port(own) and not is_free(host, int(own)):
            yield (
                f"{variable}: HAProxy's mode needs port {own}, which is in use; stop the program "
                "that uses it, perhaps another server, or leave the variable out\n"
            )


def _has_haproxy() -> bool:
    return os.environ.get(HAPROXY) == "1"


def _port_variables() -> list[str]:
    # `raystream serve` has set those that the user has not, to free ports.
    return [variable for variable in HAPROXY_PORTS if variable in os.environ]


def _is_port(value: str) -> bool:
    return value.isascii() and value.isdecimal() and 0 < int(value) < 2**16
