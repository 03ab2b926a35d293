"""`loadtest run`: sends the load, writes the results, says what they are.

The flags are handed on as they were written; `RunConfig` reads and checks them, whether they come
from here or from a file.
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

from loadtest.commands import run_flags as flags
from loadtest.commands.result_console import EnduringConsole, result_console
from loadtest.commands.usage import mistakes_of, refuse
from loadtest.config import RunConfig
from loadtest.config_file import ConfigFileError, read_config_file
from loadtest.live_display import LiveDisplay
from loadtest.load.stop import Stop
from loadtest.load.sweep import Material, Sweep, read_material
from loadtest.report_files import write_all
from loadtest.run_clock import clock_from_now
from loadtest.summary_table import render

SIGNAL_BASE: Final = 128
"""A process that a signal ended exits with this and the signal's number, as shells have it."""

_REPLACES: Final = {
    "loops": ("requests", "duration"),
    "requests": ("loops", "duration"),
    "duration": ("loops", "requests"),
    "rate": ("queues", "loops", "interval"),
    "queues": ("rate", "arrival"),
}

HELP: Final = (
    "Load a server and say how much it carries. Exits with 0 if all is fine, 1 if too many "
    "requests failed or none succeeded, 2 if the command is wrong, 99 if a threshold was crossed, "
    "130 or 143 if it was stopped, with everything saved."
)


class RunCommand(TyperCommand):
    """Takes several objectives behind one `--slo`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write `--slo a:1 b:2` as `--slo a:1 --slo b:2`, then parse."""
        return super().parse_args(ctx, with_flag_repeated("--slo", args))


def with_flag_repeated(flag: str, args: list[str]) -> list[str]:
    """Put the flag in front of each `name:number` that follows it."""
    repeated: list[str] = []
    is_in_list = False
    for arg in args:
        is_objective = re.fullmatch(r"[a-z0-9_]+:[0-9.]+", arg) is not None
        if is_in_list and is_objective and repeated[-1] != flag:
            repeated.append(flag)
        is_in_list = arg == flag or (is_in_list and is_objective)
        repeated.append(arg)
    return repeated


def run(
    ctx: typer.Context,
    url: flags.Url = None,
    queues: flags.Queues = None,
    loops: flags.Loops = None,
    requests: flags.Requests = None,
    duration: flags.Duration = None,
    grace: flags.Grace = None,
    ramp: flags.Ramp = None,
    warmup: flags.Warmup = None,
    interval: flags.Interval = None,
    repeat: flags.Repeat = None,
    rate: flags.Rate = None,
    arrival: flags.Arrival = None,
    max_inflight: flags.MaxInflight = None,
    data: flags.Data = None,
    order: flags.Order = None,
    seed: flags.Seed = None,
    unique: flags.Unique = None,
    images: flags.Images = None,
    users: flags.Users = None,
    max_tokens: flags.MaxTokens = None,
    temperature: flags.Temperature = None,
    api: flags.Api = None,
    model: flags.Model = None,
    body: flags.Body = None,
    text_path: flags.TextPath = None,
    done: flags.Done = None,
    header: flags.Header = None,
    api_key_env: flags.ApiKeyEnv = None,
    timeout: flags.Timeout = None,
    first_token_timeout: flags.FirstTokenTimeout = None,
    stall_timeout: flags.StallTimeout = None,
    slo: flags.Slo = None,
    fail_if: flags.FailIf = None,
    max_error_rate: flags.MaxErrorRate = None,
    out: flags.Out = None,
    png: flags.Png = None,
    gpu: flags.Gpu = None,
    config: flags.Config = None,
) -> None:
    """Load a server and say how much it carries."""
    given = {name: value for name, value in ctx.params.items() if value not in (None, [])}
    run_config = _read_config(given)
    try:
        material = read_material(run_config)
    except (OSError, ValueError) as error:
        refuse(str(error))
    directory = run_config.out or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    raise typer.Exit(_carry_out(run_config, material, directory))


def _read_config(given: dict[str, Any]) -> RunConfig:
    """Return the configuration: the file's, with the flags laid over it."""
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
    """Lay flags over a file's settings: one way to limit or to shape the load replaces another."""
    replaced = {other for name in given for other in _REPLACES.get(name, ())}
    kept = {name: value for name, value in settings.items() if name not in replaced}
    return {**kept, **given}


def _carry_out(config: RunConfig, material: Material, directory: Path) -> int:
    """Send, analyse and tell; return the exit code."""
    raise_file_limit()
    try:
        stop = send_all(config, material, directory)
    except OSError as error:
        refuse(_said_of_directory(directory, error))
    except ExceptionGroup as group:
        if (failed := _os_error_in(group)) is None:
            raise
        typer.echo(f"loadtest: {directory} can't be written on ({failed.strerror})", err=True)
        typer.echo(f"loadtest: {_said_of_files(directory)}", err=True)
        return 1
    try:
        results = write_all(directory, png=config.png)
    except KeyboardInterrupt:
        typer.echo(f"loadtest: {_said_of_files(directory)}", err=True)
        return SIGNAL_BASE + signal.SIGINT
    console = result_console()
    render(results, console)
    console.print(f"Report: {directory / 'report.html'}", markup=False, highlight=False)
    if stop.signal_number is not None:
        return SIGNAL_BASE + stop.signal_number
    return results.verdict.exit_code


def _os_error_in(group: ExceptionGroup) -> OSError | None:
    """Find what the system refused: a full disk, met while requests were under way."""
    for error in group.exceptions:
        found = _os_error_in(error) if isinstance(error, ExceptionGroup) else error
        if isinstance(found, OSError):
            return found
    return None


def _said_of_files(directory: Path) -> str:
    return (
        f"all that was measured until then lies in {directory}; `loadtest report {directory}` "
        "makes its report"
    )


def _said_of_directory(directory: Path, error: OSError) -> str:
    if isinstance(error, FileExistsError) and directory.is_dir():
        return f"--out: {directory} holds a run already; name another directory"
    return f"--out: {directory} can't be written ({error.strerror}); name another directory"


def send_all(config: RunConfig, material: Material, directory: Path) -> Stop:
    """Send the load from an event loop of its own, and listen to signals meanwhile."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_send(config, material, directory))


async def _send(config: RunConfig, material: Material, directory: Path) -> Stop:
    console, clock = EnduringConsole(stderr=True), clock_from_now()
    stop = Stop(console.print)
    with stop.on_signals():
        async with LiveDisplay(console, clock) as display:
            await Sweep(config, material, display, stop, clock).run(directory)
    return stop


def raise_file_limit() -> None:
    """Let the process have as many connections as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems refuse a limit that they call unlimited; then what there is has to do.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
