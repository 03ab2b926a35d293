"""`loadtest run`: sends the load, writes the results, says what they are.

The flags are handed on as they were written; `RunConfig` reads and checks them, whether they come
from here or from a file.
"""

import asyncio
import re
import resource
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import uvloop
from pydantic import ValidationError
from rich.console import Console
from typer.core import TyperCommand

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

Text = str | None
Texts = list[str] | None

_LOAD: Final = "Load"
_OPEN_LOOP: Final = "Load by a rate"
_QUESTIONS: Final = "What is asked"
_SERVER: Final = "The server"
_RESULTS: Final = "What is made of it"


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


def flag(*names: str, text: str, panel: str, metavar: str) -> Any:
    """Return an option whose value `RunConfig` reads."""
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar)


def run(
    ctx: typer.Context,
    url: Annotated[Text, typer.Argument(metavar="URL", show_default=False)] = None,
    queues: Annotated[
        Text,
        flag(
            "-q",
            "--queues",
            "--concurrency",
            text="Users at once, each with one request at a time; a list is a sweep. [default: 5]",
            panel=_LOAD,
            metavar="N|1,2,4",
        ),
    ] = None,
    loops: Annotated[
        Text,
        flag("-n", "--loops", text="Requests of each queue. [20]", panel=_LOAD, metavar="N"),
    ] = None,
    requests: Annotated[
        Text, flag("--requests", text="Requests in all.", panel=_LOAD, metavar="N")
    ] = None,
    duration: Annotated[
        Text, flag("-d", "--duration", text="How long to send.", panel=_LOAD, metavar="60s")
    ] = None,
    grace: Annotated[
        Text,
        flag(
            "--grace",
            text="How long requests may go on, once nothing more is sent. [30s]",
            panel=_LOAD,
            metavar="30s",
        ),
    ] = None,
    ramp: Annotated[
        Text,
        flag("--ramp", text="Over how long the load rises. [0s]", panel=_LOAD, metavar="0s"),
    ] = None,
    warmup: Annotated[
        Text,
        flag(
            "--warmup",
            text="Requests in front of each level that do not count. [1]",
            panel=_LOAD,
            metavar="N",
        ),
    ] = None,
    interval: Annotated[
        Text,
        flag("--interval", text="A queue's pause. [0s]", panel=_LOAD, metavar="0s"),
    ] = None,
    repeat: Annotated[
        Text, flag("--repeat", text="How often to run it all. [1]", panel=_LOAD, metavar="N")
    ] = None,
    rate: Annotated[
        Text,
        flag(
            "--rate",
            text="Requests per second, whatever becomes of them; a list is a sweep.",
            panel=_OPEN_LOOP,
            metavar="R|1,2,4",
        ),
    ] = None,
    arrival: Annotated[
        Text,
        flag(
            "--arrival",
            text="How they follow each other. [poisson]",
            panel=_OPEN_LOOP,
            metavar="poisson|constant",
        ),
    ] = None,
    max_inflight: Annotated[
        Text,
        flag("--max-inflight", text="Most at once.", panel=_OPEN_LOOP, metavar="N"),
    ] = None,
    data: Annotated[
        Text,
        flag(
            "--data",
            text="Questions: .json, .jsonl or .txt. [100 that ship with it]",
            panel=_QUESTIONS,
            metavar="FILE",
        ),
    ] = None,
    order: Annotated[
        Text,
        flag(
            "--order",
            text="How they are drawn. [random]",
            panel=_QUESTIONS,
            metavar="random|shuffled|sequential",
        ),
    ] = None,
    seed: Annotated[
        Text, flag("--seed", text="Gives the same draws. [0]", panel=_QUESTIONS, metavar="N")
    ] = None,
    unique: Annotated[
        bool | None,
        typer.Option(
            "--unique",
            help="Begin each question in its own way; defeats prefix caches.",
            rich_help_panel=_QUESTIONS,
            show_default=False,
        ),
    ] = None,
    images: Annotated[
        Text,
        flag("--images", text="One goes with each question.", panel=_QUESTIONS, metavar="DIR"),
    ] = None,
    users: Annotated[
        Text,
        flag("--users", text="Users that ask. [100]", panel=_QUESTIONS, metavar="N"),
    ] = None,
    max_tokens: Annotated[
        Text, flag("--max-tokens", text="Of an answer.", panel=_QUESTIONS, metavar="N")
    ] = None,
    temperature: Annotated[
        Text, flag("--temperature", text="Of sampling.", panel=_QUESTIONS, metavar="T")
    ] = None,
    api: Annotated[
        Text,
        flag(
            "--api",
            text="auto, openai-chat, openai-completions, text-generation, classify or custom. "
            "[auto: by the URL's path]",
            panel=_SERVER,
            metavar="NAME",
        ),
    ] = None,
    model: Annotated[
        Text,
        flag("--model", text="[the server's first]", panel=_SERVER, metavar="NAME"),
    ] = None,
    body: Annotated[
        Text,
        flag(
            "--body",
            text="For custom: the body, with {text}, {messages}, {user}, {index}, {image_url}; "
            "else: fields laid over it.",
            panel=_SERVER,
            metavar="@t.json|JSON",
        ),
    ] = None,
    text_path: Annotated[
        Text,
        flag("--text-path", text="For custom: the text.", panel=_SERVER, metavar="JMESPATH"),
    ] = None,
    done: Annotated[
        Text,
        flag(
            "--done",
            text="For custom: the last event's data; '' if closing ends it. ['[DONE]']",
            panel=_SERVER,
            metavar="TEXT",
        ),
    ] = None,
    header: Annotated[
        Texts,
        flag("-H", "--header", text="Repeatable.", panel=_SERVER, metavar="'NAME: VALUE'"),
    ] = None,
    api_key_env: Annotated[
        Text,
        flag("--api-key-env", text="The variable with the key.", panel=_SERVER, metavar="NAME"),
    ] = None,
    timeout: Annotated[
        Text, flag("--timeout", text="Of a request. [180s]", panel=_SERVER, metavar="180s")
    ] = None,
    first_token_timeout: Annotated[
        Text,
        flag("--first-token-timeout", text="To its first text.", panel=_SERVER, metavar="5s"),
    ] = None,
    stall_timeout: Annotated[
        Text,
        flag("--stall-timeout", text="To its next text.", panel=_SERVER, metavar="5s"),
    ] = None,
    slo: Annotated[
        Texts,
        flag(
            "--slo",
            text="What makes a request good, in ms: ttft:2000 tpot:100 e2e:30000.",
            panel=_RESULTS,
            metavar="NAME:MS ...",
        ),
    ] = None,
    fail_if: Annotated[
        Texts,
        flag(
            "--fail-if",
            text="What makes it exit with 99. Repeatable.",
            panel=_RESULTS,
            metavar="'ttft.p95>2000'",
        ),
    ] = None,
    max_error_rate: Annotated[
        Text,
        flag("--max-error-rate", text="Beyond, exit with 1. [0]", panel=_RESULTS, metavar="0..1"),
    ] = None,
    out: Annotated[
        Text,
        flag("--out", text="Results. [runs/<time>/]", panel=_RESULTS, metavar="DIR"),
    ] = None,
    png: Annotated[
        bool | None,
        typer.Option(
            "--png",
            help="Write the plots as PNG too.",
            rich_help_panel=_RESULTS,
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        Text,
        flag(
            "--gpu",
            text="Watch this machine's GPUs. [auto]",
            panel=_RESULTS,
            metavar="auto|on|off",
        ),
    ] = None,
    config: Annotated[
        Text,
        flag("--config", text="A file of these names.", panel=_RESULTS, metavar="run.yml"),
    ] = None,
) -> None:
    """Load a server and say how much it carries.

    Exits with 0 if all is fine, 1 if too many requests failed or none succeeded, 2 if the command
    is wrong, 99 if a threshold was crossed, 130 or 143 if it was stopped; the results are saved.
    """
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
        return RunConfig.model_validate({**settings, **given})
    except ConfigFileError as error:
        refuse(str(error))
    except ValidationError as error:
        refuse(*mistakes_of(error))


def _carry_out(config: RunConfig, material: Material, directory: Path) -> int:
    """Send, analyse and tell; return the exit code."""
    raise_file_limit()
    try:
        stop = send_all(config, material, directory)
    except FileExistsError:
        refuse(f"--out: {directory} holds a run already; name another directory")
    results = write_all(directory, png=config.png)
    console = Console()
    render(results, console)
    console.print(f"Report: {directory / 'report.html'}", markup=False, highlight=False)
    if stop.signal_number is not None:
        return SIGNAL_BASE + stop.signal_number
    return results.verdict.exit_code


def send_all(config: RunConfig, material: Material, directory: Path) -> Stop:
    """Send the load from an event loop of its own, and listen to signals meanwhile."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_send(config, material, directory))


async def _send(config: RunConfig, material: Material, directory: Path) -> Stop:
    stop = Stop()
    clock = clock_from_now()
    with stop.on_signals():
        async with LiveDisplay(Console(stderr=True), clock) as display:
            await Sweep(config, material, display, stop, clock).run(directory)
    return stop


def raise_file_limit() -> None:
    """Let the process have as many connections as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems refuse a limit that they call unlimited; then what there is has to do.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
