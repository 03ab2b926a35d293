"""`raystream-preflight FILE`: what `make serve` does before it starts Ray.

Checks the file as `raystream-check` does, then that its port is free, and those that HAProxy's mode
needs beside it, since Serve tells of a taken one late and at length; and says how to try what will
be served.
"""

import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from errno import EADDRINUSE

import yaml
from ray.serve.schema import ServeDeploySchema

from serve_app.api_keys import ApiKeysError, load_api_keys
from serve_app.check import BUILDER, check_file
from serve_app.config import PROJECT_ROOT, AppConfig

# Where Serve listens besides in HAProxy's mode, and the variables that say otherwise. The last is
# bound with SO_REUSEPORT: two servers would get each other's requests.
# Source: ray.serve._private.constants.
HAPROXY_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
}
QUESTION = "What does os.path.join do?"


def main() -> int:
    """Check the file that the command line names and return the exit code."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: raystream-preflight FILE\n")
        return 2
    name = sys.argv[1]
    if not check_file(name):
        return 1
    with open(name, encoding="utf-8") as file:
        document = yaml.safe_load(file)
    http = ServeDeploySchema.model_validate(document).http_options
    if taken := list(taken_ports(name, http.host, http.port)):
        sys.stderr.writelines(taken)
        return 1
    application = next(a for a in document["applications"] if a["import_path"] == BUILDER)
    try:
        keys = load_api_keys(AppConfig.model_validate(application["args"]).auth, PROJECT_ROOT)
    except ApiKeysError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 1
    sys.stdout.write(f"Once it is up, try:\n{example(http.port, application, keys is not None)}\n")
    return 0


def taken_ports(name: str, host: str, port: int) -> Iterator[str]:
    """Yield a line for each port that the server needs and something else listens on."""
    if not is_free(host, port):
        yield (
            f"{name}: http_options.port: {port} is in use on {host}; "
            "end what listens there, or choose another port\n"
        )
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return
    for variable, default in HAPROXY_PORTS.items():
        own = int(os.environ.get(variable, default))
        if not is_free("0.0.0.0", own):
            yield (
                f"{variable}: HAProxy's mode needs port {own}, which is in use; end what listens "
                "there, another server perhaps, or set the variable to another port\n"
            )


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As servers do: a port whose connections have just been closed is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == EADDRINUSE:
                return False
            raise
        return True


def example(port: int, application: dict[str, object], needs_key: bool) -> str:
    """Return a curl command that asks the first model a question."""
    args = application["args"]
    assert isinstance(args, dict)
    body = {
        "model": args["models"][0]["id"],
        "stream": True,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    return (
        f"  curl -N http://127.0.0.1:{port}/v1/chat/completions "
        f"-H 'Content-Type: application/json' \\\n"
        + ("    -H 'Authorization: Bearer KEY' \\\n" if needs_key else "")
        + f"    -d {shlex.quote(json.dumps(body))}"
    )
