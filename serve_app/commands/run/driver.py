"""Ray's driver of `raystream serve`: starts Ray and an application, and says when it is ready.

It does what `serve run --address local FILE` does, in the same process and by the same code, around
which it puts what a terminal needs: checks before Ray starts (`preflight`), a screen without the
INFO lines of Ray's workers (`worker_logs`), and the server's address as the last lines
(`announcement`). If the application fails to start, the driver ends with 1; `serve run` goes on.

It works in the file's folder, from which relative paths in the file start. No process imports a
module of that folder in place of an installed one: it comes last (`worker_logs.set_up_worker`).
"""

import io
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import chdir, redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any
from urllib.request import getproxies

import ray
import yaml
from ray import serve
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
from ray.job_config import JobConfig
from ray.serve.schema import (
    ApplicationStatus,
    ProxyStatus,
    ServeDeploySchema,
    ServeStatus,
)
from ray.serve.scripts import run
from rich.console import Console

from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.plan.memory_budget import ModelTooLargeError
from deployments.replica.start_board import read_starts
from serve_app.backends.models.serving_states import reason_in
from serve_app.commands.check.compose import (
    BUILDER,
    Configuration,
    ServeOptions,
    configuration,
    in_words,
)
from serve_app.commands.check.preflight import Depth, examine, in_file
from serve_app.commands.run import worker_logs
from serve_app.commands.run.announcement import (
    Announcement,
    StartFailedError,
    local_url,
    wait_until_ready,
)
from serve_app.commands.run.server_record import complete_record, supervising
from serve_app.commands.run.start_screen import StartScreen
from serve_app.commands.server_environment import HAPROXY
from serve_app.config import AppConfig
from serve_app.keys.api_keys import load_api_keys
from serve_app.shipped_files import SHIPPED
from serve_app.strict_yaml import why_unreadable

FINAL = (UnsupportedModelError.__name__, ModelTooLargeError.__name__)
"""Errors that a further attempt to start ends with, too."""

PROXY = "the proxy in front"
"""What is awaited last: HAProxy, or Serve's own proxy."""

PROXIED = frozenset({"http", "https", "all"})
"""Schemes for which the environment may name a proxy."""

WORKER_HOOK = f"{worker_logs.__name__}.{worker_logs.set_up_worker.__name__}"


def main() -> int:
    """Serve what the command line asks for and return the exit code; see `ServeOptions`."""
    options = ServeOptions.parse(sys.argv[1:])
    try:
        try:
            found = configuration(options)
        except (OSError, UnicodeDecodeError) as error:
            sys.stderr.write(f"{options.names[0]}: {why_unreadable(error)}\n")
            return 1
        if not _passes(found, options):
            return 1
        if options.save is not None and not _saved(found, Path(options.save)):
            return 1
        os.chdir(found.folder)
        if found.file is not None and not options.given:
            return _serve(found.file.name, found)
        # `raystream status` removes the supervisor's folder after a kill, and all that is in it.
        server = supervising(os.environ)
        parent = None if server is None else server.folder
        with TemporaryDirectory(prefix="config-", dir=parent) as folder:
            file = Path(folder, "serve_config.yaml")
            file.write_text(found.text, encoding="utf-8")
            return _serve(str(file), found)
    except KeyboardInterrupt:  # a second one: Ray ends its processes when this one exits
        return 130


def _passes(found: Configuration, options: ServeOptions) -> bool:
    """Check a configuration, and write what is wrong with it to standard error."""
    with chdir(found.folder):
        faults = examine(found.text, Depth.START, found.known).faults
    if options.save is not None and Path(options.save).exists():
        faults.append(f"--save: {options.save} exists; name another file")
    if found.file is None:
        # An option's fault may be told for each model.
        told = dict.fromkeys(in_words(each, len(options.names)) for each in faults)
        sys.stderr.writelines(f"Error: {each}\n" for each in told)
    else:
        text = found.file.read_text(encoding="utf-8")
        sys.stderr.writelines(f"{in_file(found.name, text, each)}\n" for each in faults)
    return not faults


def _saved(found: Configuration, file: Path) -> bool:
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(found.text)
    except OSError as error:
        sys.stderr.write(f"Error: --save: {file}: {error.strerror}\n")
        return False
    _tell(f"{file} is written; serve it again by: raystream serve {file}\n")
    return True


def _serve(file: str, found: Configuration) -> int:
    """Serve a file, which holds the configuration."""
    started_s = time.monotonic()
    what = found.name if found.file is None else f"the models of {found.file.name}"
    _tell(f"Starting Ray and {what}; large models take minutes.\n")
    worker_logs.keep_info_in_files()
    worker_logs.hide_crash_reports()
    # Workers inherit this. `worker_process_setup_hook` in `runtime_env` sets it too, but then the
    # workers that Ray starts in advance don't fit, and stay idle.
    os.environ[WORKER_PROCESS_SETUP_HOOK_ENV_VAR] = WORKER_HOOK
    try:
        announcement = _start(file, found, started_s)
        _tell(announcement.text(time.monotonic() - started_s))
        Event().wait()
    except StartFailedError as error:
        sys.stderr.write(f"The application did not start: {error}\n")
        return 1
    except KeyboardInterrupt:
        _tell("\nStopping.\n")
    finally:
        _stop()
    _tell("Stopped.\n")
    return 0


def _start(file: str, found: Configuration, started_s: float) -> Announcement:
    """Start Ray and the application, and wait until it is ready.

    Raises:
        StartFailedError: It will not get ready.
    """
    # `deploy` takes standard output away for a while.
    console = Console(file=sys.stdout)
    with StartScreen(console, started_s=started_s) as screen:
        context: Any = ray.init(
            address="local",
            namespace="serve",  # that of `serve run`
            # Of a client's job, Ray puts no working directory before what its workers import from.
            job_config=JobConfig(_client_job=True),
            logging_level=logging.WARNING,
        )
        session = Path(context.address_info["session_dir"])
        app, announcement = describe(file, context.dashboard_url, session)
        address = context.address_info["gcs_address"]
        complete_record(
            os.environ,
            None if found.file is None else found.folder / found.file.name,
            found.folder,
            announcement.url,
            announcement.dashboard_url,
            address,
        )
        screen.awaited = (app,)
        deploy(file, address)
        screen.read_starts = partial(read_starts, app)
        wait_until_ready(announcement, lambda: pending_deployments(serve.status(), app), screen)
    return announcement


def _tell(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def deploy(name: str, address: str) -> None:
    """Deploy a file's applications to the Ray that this process has started.

    Raises:
        StartFailedError: The command of Serve failed; the text is its output.
    """
    told = io.StringIO()
    try:
        with (
            redirect_stdout(told),  # two lines that say what ours say
            # The folder goes before all else to import from; this one is none.
            run.make_context(
                "run", ["--non-blocking", "--app-dir", os.devnull, "--address", address, name]
            ) as context,
        ):
            run.invoke(context)
    except SystemExit as error:
        if error.code:  # SIGTERM
            raise
        if isinstance(error.__context__, KeyboardInterrupt):  # the command has caught it
            raise KeyboardInterrupt from error
        # The command has written the traceback to standard error.
        raise StartFailedError(told.getvalue()) from error


def describe(name: str, dashboard_url: str | None, session: Path) -> tuple[str, Announcement]:
    """Return the name of a file's application, and the announcement of its server.

    Args:
        name: The file.
        dashboard_url: Ray's dashboard, without a scheme; None or empty if it does not run.
        session: The folder of Ray's session.
    """
    schema, config = _application(name)
    application = next(a for a in schema.applications if a.import_path == BUILDER)
    http, prefix = schema.http_options, application.route_prefix or "/"
    return application.name, Announcement(
        url=local_url(http.host, http.port, prefix, has_tls=http.ssl_certfile is not None),
        models=config.models,
        needs_key=load_api_keys(config.auth, SHIPPED, os.environ) is not None,
        dashboard_url=f"http://{dashboard_url}" if dashboard_url else None,
        logs=str(session / "logs" / "serve"),
        has_proxy=not PROXIED.isdisjoint(getproxies()),
        has_haproxy=os.environ.get(HAPROXY) == "1",
    )


def _application(name: str) -> tuple[ServeDeploySchema, AppConfig]:
    with open(name, encoding="utf-8") as file:
        schema = ServeDeploySchema.model_validate(yaml.safe_load(file))
    application = next(a for a in schema.applications if a.import_path == BUILDER)
    return schema, AppConfig.model_validate(application.args)


def pending_deployments(status: ServeStatus, name: str) -> list[str]:
    """Return the deployments of an application that do not run yet, or that Serve's proxy does not.

    Raises:
        StartFailedError: Serve has given the application up, or a model fails of one of `FINAL`,
            which Serve would try twice more. The text says why in one line.
    """
    application = status.applications.get(name)
    if application is None:
        return [name]
    failures = {
        id_: deployment.message
        for id_, deployment in application.deployments.items()
        if "failed to start" in deployment.message
    }
    is_final = any(error in message for error in FINAL for message in failures.values())
    if application.status == ApplicationStatus.DEPLOY_FAILED or is_final:
        raise StartFailedError(_in_one_line(failures) or reason_in(application.message))
    if application.status == ApplicationStatus.RUNNING:
        # Another server answers at the address if it has taken the port meanwhile.
        return [] if ProxyStatus.HEALTHY in status.proxies.values() else [PROXY]
    deployments = application.deployments.items()
    return [id_ for id_, deployment in deployments if deployment.status != "HEALTHY"] or [name]


def _in_one_line(failures: Mapping[str, str]) -> str:
    """Return what each deployment failed of, without tracebacks."""
    return "; ".join(f"{id_}: {reason_in(message)}" for id_, message in failures.items())


def _stop() -> None:
    if not ray.is_initialized():
        return
    # Ray reports here that the controller has died, as it does after every shutdown.
    with redirect_stdout(io.StringIO()):
        serve.shutdown()  # type: ignore[no-untyped-call] # Ray leaves it untyped
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
