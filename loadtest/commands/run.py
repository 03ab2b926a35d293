"""`loadtest run`: sends the load, writes the results and prints them.

Flags are passed on as written; `RunConfig` parses and checks them as it does a file's settings.
"""

import asyncio
import re
import resource
import signal
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import typer
import uvloop
from pydantic import ValidationError
from typer.core import TyperCommand

from loadtest.client.clock import clock_from_now
from loadtest.commands.extra import need_extra
from loadtest.commands.live_display import LiveDisplay
from loadtest.commands.result_console import EnduringConsole, result_console
from loadtest.commands.run_flags import with_flags
from loadtest.commands.usage import mistakes_of, refuse
from loadtest.config.config_file import ConfigFileError, read_config_file
from loadtest.config.run_config import RunConfig
from loadtest.load.inputs import Inputs, read_inputs
from loadtest.load.stop import Stop
from loadtest.load.sweep import Sweep
from loadtest.report.report_files import write_all
from loadtest.report.summary_table import render

SIGNAL_BASE: Final = 128
"""A process ended by a signal exits with this plus the signal's number, as shells do."""

_EXCLUDES: Final = {
    "loops": ("requests", "duration"),
    "requests": ("loops", "duration"),
    "duration": ("loops", "requests"),
    "rate": ("queues", "loops", "interval"),
    "queues": ("rate", "arrival"),
}

HELP: Final = (
    "Send load to a server and report how much it can carry. Exit codes: 0 passed, 1 too many "
    "requests failed or none succeeded, 2 wrong usage, 99 a threshold was crossed, 130 or 143 "
    "stopped by a signal, with the results saved."
)


class RunCommand(TyperCommand):
    """Allows several objectives after one `--slo`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite `--slo a:1 b:2` as `--slo a:1 --slo b:2`, then parse."""
        return super().parse_args(ctx, with_flag_repeated("--slo", args))


def with_flag_repeated(flag: str, args: list[str]) -> list[str]:
    """Repeat the flag before each `name:number` that follows it."""
    repeated: list[str] = []
    is_in_list = False
    for arg in args:
        is_objective = re.fullmatch(r"[a-z0-9_]+:[0-9.]+", arg) is not None
        if is_in_list and is_objective and repeated[-1] != flag:
            repeated.append(flag)
        is_in_list = arg == flag or (is_in_list and is_objective)
        repeated.append(arg)
    return repeated


@with_flags
def run(**flags: Any) -> None:
    """Send load to a server and report how much it can carry."""
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    run_config = _read_config(given)
    need_extra(png=run_config.png, text_path=run_config.text_path is not None)
    try:
        inputs = read_inputs(run_config)
    except (OSError, ValueError) as error:
        refuse(str(error))
    directory = run_config.out or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    raise typer.Exit(_carry_out(run_config, inputs, directory))


def _read_config(given: dict[str, Any]) -> RunConfig:
    """Return the configuration: the file's settings, overridden by the flags."""
    path = given.pop("config", None)
    settings: dict[str, Any] = {}
    try:
        if path is not None:
            read = read_config_file(Path(path))
            settings = read.settings
            for notice in read.notices:
                typer.echo(f"loadtest: {notice}", err=True)
        return RunConfig.model_validate(overlaid(settings, given))
    except ConfigFileError as error:
        refuse(str(error))
    except ValidationError as error:
        refuse(*mistakes_of(error))


def overlaid(settings: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Override a file's settings with flags.

    A flag that limits or shapes the load also removes the file's settings that exclude it.
    """
    replaced = {other for name in given for other in _EXCLUDES.get(name, ())}
    kept = {name: value for name, value in settings.items() if name not in replaced}
    return {**kept, **given}


def _carry_out(config: RunConfig, inputs: Inputs, directory: Path) -> int:
    """Send the load, analyse it and print the results; return the exit code."""
    raise_file_limit()
    try:
        stop = send_all(config, inputs, directory)
    except OSError as error:
        refuse(_directory_error(directory, error))
    except ExceptionGroup as group:
        if (failed := _os_error_in(group)) is None:
            raise
        typer.echo(f"loadtest: can't write to {directory} any more ({failed.strerror})", err=True)
        typer.echo(f"loadtest: {_saved_message(directory)}", err=True)
        return 1
    try:
        results = write_all(directory, png=config.png)
    except KeyboardInterrupt:
        typer.echo(f"loadtest: {_saved_message(directory)}", err=True)
        return SIGNAL_BASE + signal.SIGINT
    console = result_console()
    render(results, console)
    console.print(f"Report: {directory / 'report.html'}", markup=False, highlight=False)
    if stop.signal_number is not None:
        return SIGNAL_BASE + stop.signal_number
    return results.verdict.exit_code


def _os_error_in(group: ExceptionGroup) -> OSError | None:
    """Find the system's error, such as a full disk while requests were in flight."""
    for error in group.exceptions:
        found = _os_error_in(error) if isinstance(error, ExceptionGroup) else error
        if isinstance(found, OSError):
            return found
    return None


def _saved_message(directory: Path) -> str:
    return (
        f"{directory} holds all measurements until then; `loadtest report {directory}` makes their "
        "report"
    )


def _directory_error(directory: Path, error: OSError) -> str:
    if isinstance(error, FileExistsError) and directory.is_dir():
        return f"--out: {directory} already holds a run; name another directory"
    return f"--out: {directory} can't be written ({error.strerror}); name another directory"


def send_all(config: RunConfig, inputs: Inputs, directory: Path) -> Stop:
    """Send the load in a new event loop that handles signals."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_send(config, inputs, directory))


async def _send(config: RunConfig, inputs: Inputs, directory: Path) -> Stop:
    console, clock = EnduringConsole(stderr=True), clock_from_now()
    stop = Stop(console.print)
    with stop.on_signals():
        async with LiveDisplay(console, clock) as display:
            await Sweep(config, inputs, display, stop, clock).run(directory)
    return stop


def raise_file_limit() -> None:
    """Allow the process as many connections as the system permits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems refuse their own "unlimited"; the current limit then stays.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
