"""`raystream status`, `deploy` and `stop`: find this user's servers on this machine and reach them.

The record of a server (`server_record`) names Ray's API and the file of its token, so none of them
reaches another Ray that runs here. What a server does is asked of that API, as `serve status` and
`serve deploy` do, without importing Ray.

Source: https://docs.ray.io/en/latest/serve/api/index.html#serve-rest-api
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, suppress
from copy import deepcopy
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import yaml

from serve_app.commands.check.compose import BUILDER
from serve_app.commands.run.server_record import (
    FoundServer,
    is_held,
    note_file,
    other_users,
    own_servers,
)
from serve_app.commands.run.supervise import STOP_S
from serve_app.config import AppConfig
from serve_app.gpu_shares import to_spec
from serve_app.vllm_environment import folder_of

Tell = Callable[[str], None]
Details = Mapping[str, Any]

APPLICATIONS: Final = "/api/serve/applications/"
TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.5
TELL_EVERY_S: Final = 10.0
AUTH_KEYS: Final = ("api_keys", "api_keys_file", "allow_anonymous")
"""What says in a file whom it serves."""

RUNNING: Final = "RUNNING"
FAILED: Final = ("DEPLOY_FAILED", "UNHEALTHY")


class OperateError(Exception):
    """A server can't be reached or chosen; the message says what to do."""


def status(tell: Tell, environment: Mapping[str, str]) -> bool:
    """Show this user's servers on this machine; return whether there is any.

    The folders of servers that were killed are removed.
    """
    servers = _living(tell, environment)
    for server in servers:
        tell(f"{server.record.name}, process {server.record.process_id}")
        try:
            for line in _lines(_details(server)):
                tell(f"  {line}")
        except OperateError as error:
            tell(f"  {error}")
    if not servers:
        tell("No server of yours runs on this machine; start one by: raystream serve")
    if users := other_users(environment):
        tell(f"Servers of others ({', '.join(users)}) only they can see, deploy to and stop.")
    return bool(servers)


def _lines(details: Details) -> Iterator[str]:
    """Yield a line for each application and each of its deployments."""
    if not details.get("applications"):
        yield "nothing is deployed yet"
    for name, application in details.get("applications", {}).items():
        yield f"{name}: {application['status']} {_why(application)}".rstrip()
        for id_, deployment in application.get("deployments", {}).items():
            states: dict[str, int] = {}
            for replica in deployment.get("replicas", ()):
                states[replica["state"]] = states.get(replica["state"], 0) + 1
            counts = ", ".join(f"{num} {state.lower()}" for state, num in states.items())
            told = f"{deployment['status']} ({counts or 'no replicas'}) {_why(deployment)}"
            yield f"  {id_}: {told}".rstrip()


def _why(part: Details) -> str:
    """Return the last line of Serve's message, which says what a traceback is about."""
    if part["status"] in (RUNNING, "HEALTHY"):
        return ""
    lines = [line.strip() for line in part.get("message", "").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def stop(port: int | None, tell: Tell, environment: Mapping[str, str]) -> None:
    """Stop a server of this user as Ctrl-C does, and wait until it has ended.

    Args:
        port: Its port; None if there is only one.
        tell: Shows a line to the user.
        environment: Names folders in which servers may have theirs.

    Raises:
        OperateError: There is none, or several, or it does not end.
    """
    server = _choose(_living(tell, environment), port)
    if not server.record.is_process_here():
        raise OperateError(
            f"{server.record.name} runs in another container or namespace: stop it there"
        )
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(server.record.process_id, signal.SIGTERM)
    tell(f"Stopping {server.record.name}")
    # The supervisor kills what has not ended in STOP_S.
    _wait(lambda: not is_held(server.folder), 2 * STOP_S, f"{server.record.name} does not end")
    tell("Stopped.")


def _choose(servers: Sequence[FoundServer], port: int | None) -> FoundServer:
    """Return the server that is meant."""
    found = [each for each in servers if port is None or each.record.port == port]
    if len(found) == 1:
        return found[0]
    names = "; ".join(each.record.name for each in servers)
    if not servers:
        raise OperateError("no server of yours runs on this machine")
    if not found:
        raise OperateError(f"no server of yours has the port {port}; there is {names}")
    raise OperateError(f"{len(found)} servers of yours run; name one by --port: {names}")


def _living(tell: Tell, environment: Mapping[str, str]) -> list[FoundServer]:
    """Return the servers that live; remove the folders of those that were killed."""
    found = own_servers(environment)
    for server in found:
        if not server.is_alive:
            shutil.rmtree(server.folder, ignore_errors=True)
            tell(f"{server.record.name} was killed; its folder {server.folder} is removed")
    return [each for each in found if each.is_alive]


def deploy(file: Path, tell: Tell, environment: Mapping[str, str]) -> None:
    """Bring a file, which is correct, to the server of this user that has its port; wait for it.

    Args:
        file: The configuration.
        tell: Shows a line to the user.
        environment: Names folders in which servers may have theirs.

    Raises:
        OperateError: There is no such server, or it can't serve the file.
    """
    from ray.serve.schema import HTTPOptionsSchema  # as the check has

    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    http = HTTPOptionsSchema.model_validate(document.get("http_options") or {}).model_dump()
    server = _server_for(http["port"], file, _living(tell, environment))
    before = _details(server)
    _require_same_address(http, before)
    _require_keys(document, file, before)
    if server.record.working_folder != str(file.absolute().parent):
        document = with_absolute_paths(document, file.absolute().parent)
    body = _as_json(document, file)
    started_s, deployed_s = time.monotonic(), _deployed_unix_s(before)
    _ask(server, body)
    note_file(server, file.absolute())
    tell(f"{file} is sent to {server.record.url}")
    told_s = started_s
    while waiting := _pending(_details(server), document, deployed_s):
        if time.monotonic() - told_s >= TELL_EVERY_S:
            told_s = time.monotonic()
            tell(f"Still waiting after {told_s - started_s:.0f} s for {', '.join(waiting)}")
        time.sleep(POLL_S)
    tell(f"{file} is served after {time.monotonic() - started_s:.0f} s: {server.record.url}")


def _server_for(port: int, file: Path, servers: Sequence[FoundServer]) -> FoundServer:
    found = next((each for each in servers if each.record.port == port), None)
    if found is not None:
        return found
    start = f"`raystream serve {file}` starts one"
    if not servers:
        raise OperateError(
            f"no server of yours runs on this machine; {start}, and `serve deploy {file} --address "
            "URL` brings the file to a cluster"
        )
    names = "; ".join(each.record.name for each in servers)
    raise OperateError(
        f"no server of yours has the port {port} of {file}; there is {names}. A running server "
        f"keeps its port: write that into the file, or {start}"
    )


def _require_same_address(http: Details, details: Details) -> None:
    """Refuse what Serve would silently leave as it is: another option, or one that is now missing.

    Args:
        http: All of the file's `http_options`, its defaults included.
        details: The server's.
    """
    running: Mapping[str, Any] = details.get("http_options") or {}
    changed = [
        key if "password" in key else f"{key} ({running[key]!r} now)"
        for key, value in http.items()
        if key in running and running[key] != value
    ]
    if changed:
        raise OperateError(
            f"http_options of a running server can't change: {', '.join(changed)}; write them as "
            "they are, or stop the server and start it with the file"
        )


def _require_keys(document: Details, file: Path, details: Details) -> None:
    """Refuse to open by omission a server that asks for keys, as `serve FILE --api-key` does."""
    running = [
        application.get("deployed_app_config") or {}
        for application in details.get("applications", {}).values()
    ]
    keys = [key for each in running for key in _auth(each).get("api_keys") or ()]
    for application in document["applications"]:
        is_ours = application.get("import_path") == BUILDER
        if keys and is_ours and not any(_auth(application).get(key) for key in AUTH_KEYS):
            raise OperateError(
                f"the running server asks for keys, and {file} has none: write `auth: {{api_keys: "
                f"{json.dumps(keys)}}}` under its `args:`, or `auth: {{allow_anonymous: true}}` to "
                "serve everyone who reaches the port"
            )


def _auth(application: Details) -> Details:
    args = application.get("args") or {}
    return (args.get("auth") or {}) if application.get("import_path") == BUILDER else {}


def _as_json(document: Details, file: Path) -> bytes:
    """Return what Ray's API takes."""

    def refuse(value: object) -> None:
        kind = type(value).__name__
        raise OperateError(f"{file}: {value!s} is a {kind}, not text; write it in quotes")

    try:
        return json.dumps(document, default=refuse).encode()
    except TypeError as error:  # a key
        raise OperateError(f"{file}: {error}; write each key in quotes") from error


def with_absolute_paths(document: Details, folder: Path) -> dict[str, Any]:
    """Return a file with absolute paths where its own are relative to its folder.

    The server works in the folder of another file.
    """
    copy: dict[str, Any] = deepcopy(dict(document))
    with chdir(folder):
        for application in copy["applications"]:
            if application.get("import_path") != BUILDER:
                continue
            args = application["args"]
            config = AppConfig.model_validate(args)
            for section, model in zip(args["models"], config.models, strict=True):
                spec = to_spec(model, 0)
                section["source"] = spec.source
                if model.engine_python is not None:
                    section["engine_python"] = str(folder_of(model))
                for adapter, each in zip(
                    section.get("adapters", ()), spec.entry.adapters, strict=True
                ):
                    adapter["source"] = each.source
            if config.auth.api_keys_file is not None:
                args["auth"]["api_keys_file"] = _absolute(config.auth.api_keys_file)
    return copy


def _absolute(name: str) -> str:
    """Return a path from here, or as it stands if there is no such file here."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def _deployed_unix_s(details: Details) -> dict[str, float]:
    return {
        name: application.get("last_deployed_time_s", 0)
        for name, application in details.get("applications", {}).items()
    }


def _pending(details: Details, document: Details, before: Mapping[str, float]) -> list[str]:
    """Return what of a file does not run yet.

    Raises:
        OperateError: An application has failed.
    """
    waiting = []
    for application in document["applications"]:
        name = application.get("name", "default")
        found = details.get("applications", {}).get(name)
        if found is None or found.get("last_deployed_time_s", 0) == before.get(name):
            waiting.append(name)
        elif found["status"] in FAILED:
            parts = [found, *found.get("deployments", {}).values()]
            why = next(filter(None, map(_why, reversed(parts))), "")
            raise OperateError(f"{name}: {found['status']}: {why}")
        elif found["status"] != RUNNING:
            deployments = found.get("deployments", {})
            waiting += [id_ for id_, d in deployments.items() if d["status"] != "HEALTHY"] or [name]
    return waiting


def _details(server: FoundServer) -> Details:
    """Return what Serve tells of a server.

    Raises:
        OperateError: Ray's API can't be reached, or something else answers there.
    """
    with suppress(ValueError):
        answer = json.loads(_ask(server) or b"{}")
        if isinstance(answer, dict):
            return answer
    raise OperateError(f"what answers at {server.record.api_url} is not Ray's API")


def _ask(server: FoundServer, body: bytes | None = None) -> bytes:
    """Get the applications of a server, or replace them by these.

    Raises:
        OperateError: Ray's API does not run, can't be reached, or refuses.
    """
    record = server.record
    if record.url is None and record.has_driver:
        raise OperateError("it is still starting Ray")
    if record.url is None:
        raise OperateError("`raystream supervise` runs it: Ray's own commands reach it")
    if record.api_url is None:
        raise OperateError(f"{record.url}: Ray's dashboard does not run, and with it its API")
    try:
        headers = {"Content-Type": "application/json"}
        if record.token_file is not None:
            token = Path(record.token_file).read_text(encoding="utf-8").strip()
            headers["Authorization"] = f"Bearer {token}"
        request = Request(
            record.api_url + APPLICATIONS, body, headers, method="GET" if body is None else "PUT"
        )
        # No proxy that the environment names: the API is on this machine.
        with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as response:
            content: bytes = response.read()
            return content
    except HTTPError as error:
        reason = error.read().decode(errors="replace").strip().splitlines() or [error.reason]
        raise OperateError(f"Ray's API at {record.api_url} refuses: {reason[-1]}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise OperateError(f"Ray's API at {record.api_url} can't be reached: {error}") from error


def _wait(condition: Callable[[], bool], deadline_s: float, failure: str) -> None:
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > deadline_s:
            raise OperateError(failure)
        time.sleep(POLL_S)
