"""`loadtest compare`: compares two runs."""

from pathlib import Path
from typing import Annotated

import typer

from loadtest.analysis import comparison
from loadtest.commands.result_console import result_console
from loadtest.commands.usage import refuse
from loadtest.results.run import RunError, read_run


def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="Directory of the baseline run.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Directory of the run to judge.")],
) -> None:
    """Show what changed from A to B, with confidence intervals. Exits with 99 if B is worse."""
    try:
        compared = comparison.compare(read_run(before), read_run(after))
    except RunError as error:
        refuse(str(error))
    compared.render(result_console())
    raise typer.Exit(compared.exit_code)
