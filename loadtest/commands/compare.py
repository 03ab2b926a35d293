"""`loadtest compare`: two runs beside each other."""

from pathlib import Path
from typing import Annotated

import typer

from loadtest import comparison
from loadtest.commands.result_console import result_console
from loadtest.commands.usage import refuse
from loadtest.run import RunError, read_run


def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="The run to judge by.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The run to judge.")],
) -> None:
    """Say what changed from A to B, and how surely. Exits with 99 if B is worse."""
    try:
        compared = comparison.compare(read_run(before), read_run(after))
    except RunError as error:
        refuse(str(error))
    compared.render(result_console())
    raise typer.Exit(compared.exit_code)
