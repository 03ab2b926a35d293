"""The command line: `loadtest run`, `compare`, `report` and `mock`."""

import typer

from loadtest.commands.compare import compare
from loadtest.commands.mock import mock
from loadtest.commands.report import report
from loadtest.commands.run import HELP, RunCommand, run

app = typer.Typer(
    name="loadtest",
    help="Measure how much load a streaming server can carry.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(cls=RunCommand, help=HELP)(run)
app.command()(compare)
app.command()(report)
app.command()(mock)
