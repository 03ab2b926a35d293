"""`loadtest report`: writes a run's report again from its records."""

from pathlib import Path
from typing import Annotated

import typer

from loadtest.commands.extra import need_extra
from loadtest.commands.result_console import result_console
from loadtest.commands.usage import refuse
from loadtest.report.report_files import write_all
from loadtest.report.summary_table import render
from loadtest.results.run import RunError


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run's directory.")],
    png: Annotated[bool, typer.Option("--png", help="Write the plots as PNG too.")] = False,
) -> None:
    """Make a run's report again, even if the run was cut off."""
    need_extra(png=png)
    try:
        results = write_all(directory, png=png)
    except RunError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"{directory} can't be written ({error.strerror})")
    console = result_console()
    render(results, console)
    console.print(f"Report: {directory / 'report.html'}", markup=False, highlight=False)
