"""Part of `raystream check`: what Ray Serve refuses only when it deploys a file.

Ray's schema lets these mistakes pass; its controller, a replica or HAProxy finds them a minute
later, with a traceback or in silence. The options of deployments are checked by the controller's
own function.
"""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from ipaddress import IPv6Address, ip_address
from typing import Any, Final

from pydantic import ValidationError
from ray.runtime_env import RuntimeEnv
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.config import DeploymentConfig, ReplicaConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeApplicationSchema

Section = Mapping[str, Any]

MAX_PORT: Final = 2**16 - 1
DISABLED: Final = "Disabled"
MANY: Final = 2**31 - 1

HOST_NAME: Final = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
LIKE_AN_ADDRESS: Final = re.compile(r"(.*\.)?[0-9]+")
"""A name whose last part is a number is read as an IPv4 address, in one of the old ways."""

ROUTE_PREFIX: Final = re.compile(r"/|(/[A-Za-z0-9._~%+@:-]+)+")
"""HAProxy's configuration has the prefix as it stands, where other characters mean something."""

FILES: Final = ("conda", "pip", "uv")
"""Keys of a runtime environment that may name a file, which is read on the cluster."""
PLACES: Final = ("py_modules", "working_dir")
"""Keys of a runtime environment that Ray's schema checks."""


def server_problems(document: Section) -> Iterator[str]:
    """Yield what is wrong with where Serve shall listen."""
    http, grpc = document.get("http_options") or {}, document.get("grpc_options") or {}
    for path, options in (("http_options", http), ("grpc_options", grpc)):
        yield from _port_problems(options, f"{path}.port")
    host = http.get("host")
    if isinstance(host, str) and (wrong := host_problem(host)) is not None:
        yield f"http_options.host: {wrong}"
    for key in ("keep_alive_timeout_s", "request_timeout_s"):
        seconds = _number(http.get(key))
        if seconds is not None and seconds < 0:
            yield f"http_options.{key}: {http[key]} is negative"
    if document.get("proxy_location") == DISABLED:
        yield (
            "proxy_location: 'Disabled' answers no requests; write EveryNode, or HeadOnly for the "
            "head node only"
        )


def _port_problems(options: Section, path: str) -> Iterator[str]:
    port = _number(options.get("port"))
    if port is not None and not 0 < port <= MAX_PORT:
        yield f"{path}: {options['port']} is no port; choose one from 1 to {MAX_PORT}"


def host_problem(host: str) -> str | None:
    """Return why no server can listen on a host, whatever the machine; None if some can."""
    try:
        address = ip_address(host)
    except ValueError:
        if HOST_NAME.fullmatch(host) and not LIKE_AN_ADDRESS.fullmatch(host):
            return None
        return (
            f"{host!r} is neither an address nor a name; write 127.0.0.1 or ::1 to be reached from "
            "this machine, 0.0.0.0 or ::0 to be reached from others, too, or one of the machine's "
            "addresses, without brackets and port"
        )
    if host == "::":
        return (
            "Ray gives '::' to HAProxy as '*', which is IPv4 only; write '::0', the same address, "
            "which serves IPv6 and IPv4"
        )
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return f"{host!r} is an IPv4 address; write '{address.ipv4_mapped}'"
        if address.is_link_local or address.scope_id is not None:
            return (
                f"{host!r} holds on one network interface only, which neither Ray nor HAProxy can "
                "be given; write another address of the machine, or ::0"
            )
    if address.is_multicast or (address.version == 4 and address.is_reserved):
        return f"{host!r} is no address of a single machine; write one of this machine's"
    return None


def application_problems(application: Section, path: str, *, is_ours: bool) -> Iterator[str]:
    """Yield what is wrong with an application's name, prefix, environment and deployments.

    Args:
        application: Its section, in the shape of Ray's schema, without keys that name code.
        path: The section's path in the file.
        is_ours: Whether it is an application of raystream.
    """
    name = application.get("name")
    if isinstance(name, str) and ("/" in name or "#" in name):
        yield f"{path}.name: {name!r} has a '/' or '#', which Ray uses to divide names"
    yield from _prefix_problems(application, f"{path}.route_prefix", is_ours)
    yield from _environment_problems(application.get("runtime_env"), f"{path}.runtime_env")
    for index, deployment in enumerate(application.get("deployments") or []):
        yield from _option_problems(deployment, f"{path}.deployments[{index}]")


def _prefix_problems(application: Section, path: str, is_ours: bool) -> Iterator[str]:
    prefix = application.get("route_prefix", "/")
    if prefix is None and is_ours:
        yield f"{path}: null answers no requests; write / or leave it out"
    if not isinstance(prefix, str) or ROUTE_PREFIX.fullmatch(prefix):
        return
    asked = "/" + "/".join(filter(None, prefix.split("/")))
    hint = f"; did you mean {asked!r}?" if ROUTE_PREFIX.fullmatch(asked) else ""
    yield (
        f"{path}: {prefix!r} must be '/', or parts that each begin with '/' and have only letters, "
        f"digits and '._~%+@:-'{hint}"
    )


def _environment_problems(environment: Any, path: str) -> Iterator[str]:
    if not isinstance(environment, dict):
        return
    known = {
        key: value
        for key, value in environment.items()
        if key in RuntimeEnv.known_fields
        and key not in PLACES
        and not (key in FILES and isinstance(value, str))
    }
    try:
        RuntimeEnv(**known)
    except (TypeError, ValueError) as error:
        yield f"{path}: {_one_line(str(error))}"


def _option_problems(deployment: Section, path: str) -> Iterator[str]:
    """Yield what Ray's controller refuses when it puts a section's values into a deployment."""
    options = deployment.get("ray_actor_options") or {}
    yield from _environment_problems(
        options.get("runtime_env"), f"{path}.ray_actor_options.runtime_env"
    )
    num_gpus = _number(options.get("num_gpus"))
    if num_gpus is not None and num_gpus > 1 and num_gpus % 1:
        yield f"{path}.ray_actor_options.num_gpus: {num_gpus:g} is more than 1, so it must be whole"
    try:
        section = deepcopy(dict(deployment))  # some of Ray's validators change their input
        document = {"import_path": "a:b", "deployments": [section]}
        schema = ServeApplicationSchema.model_validate(document)
    except ValidationError:
        return  # found when the whole file is compared with Ray's schema
    replica = ReplicaConfig.create(deployment["name"])
    # Like our deployments, it admits more requests than autoscaling aims at.
    info = DeploymentInfo(DeploymentConfig(max_ongoing_requests=MANY), replica, 0, "")
    try:
        override_deployment_info({deployment["name"]: info}, schema)
    except ValidationError as error:
        for item in error.errors():
            steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in item["loc"])
            message = _one_line(item["msg"].removeprefix("Value error, "))
            yield f"{path}{''.join(steps)}: {message}"
    except (TypeError, ValueError, RayServeException) as error:
        message = _one_line(str(error))
        named = [key for key in deployment if key != "name" and key in message]
        yield f"{path}{f'.{named[0]}' if named else ''}: {message}"


def _number(value: object) -> float | None:
    """Return a value as Ray's schema reads it; None if it reports the value itself."""
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None


def _one_line(message: str) -> str:
    return " ".join(message.split())
