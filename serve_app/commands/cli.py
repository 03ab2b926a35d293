"""The command line: `raystream serve`, `check`, `new-key`, `info` and `supervise`.

Each command imports what it needs when it runs. `raystream serve` lives as long as its server and
only supervises it, so Ray and torch would take its memory for nothing.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="raystream",
    help="Serve transformer models from Ray Serve, on this machine or a cluster.",
    epilog="Begin with: raystream serve serve_config.yaml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="A Serve configuration, such as serve_config.yaml.",
        show_default=False,
    ),
]
KeyName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Whose key it is: 1 to 64 letters, digits and '_.@-'.",
        show_default=False,
    ),
]


@app.command()
def serve(file: ConfigFile) -> None:
    """Serve a file's models on this machine until Ctrl-C.

    The file is checked first, as `raystream check` does, and that the server's ports are free. Ray
    is started and ended with the server; a cluster that already runs here is left alone. On a
    cluster, use `serve deploy FILE` or KubeRay.
    """
    from serve_app.commands.supervise import run_supervised

    driver = (sys.executable, "-m", "serve_app.commands.driver")
    raise typer.Exit(run_supervised([*driver, str(file)]))


@app.command()
def check(file: ConfigFile) -> None:
    """Name every mistake in a file, Ray's own sections included, without starting anything.

    Ray accepts a mistyped key in silence, and checks some values only on the cluster.
    """
    from serve_app.commands.check import check_file

    raise typer.Exit(0 if check_file(str(file)) else 1)


@app.command("new-key")
def new_key(name: KeyName) -> None:
    """Make an API key, and the lines for the file of keys.

    The key is printed once and stored nowhere. The file that `auth.api_keys_file` names gets only
    its hash, and limits if you want any.
    """
    from serve_app.commands.new_key import InvalidNameError, make_key

    try:
        typer.echo(make_key(name), nl=False)
    except InvalidNameError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from None


@app.command()
def info() -> None:
    """Show what this machine and this environment have, for a report of a problem."""
    from serve_app.commands.info import describe_machine

    typer.echo(describe_machine(), nl=False)


@app.command(
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
)
def supervise(
    context: typer.Context,
    program: Annotated[str, typer.Argument(metavar="COMMAND", show_default=False)],
) -> None:
    """Run a server's command, such as `serve run FILE`, and let nothing outlive it.

    Ray's driver starts about twenty processes, and some of them would stay when it is killed.
    """
    from serve_app.commands.supervise import run_supervised

    raise typer.Exit(run_supervised([program, *context.args]))
