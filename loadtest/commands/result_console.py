"""The consoles for progress and results."""

import os
import sys
from typing import Final

from rich.console import Console

FILE_WIDTH: Final = 200
"""Wide enough for every table; a file or a pipe has no width of its own."""


class EnduringConsole(Console):
    """A console whose reader may close the pipe, as `head` does, without ending the program."""

    def on_broken_pipe(self) -> None:
        """Print nothing from now on; rich would end the process."""
        self.quiet = True
        # Python's flush at exit must not fail either, since that would change the exit code.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


def result_console() -> Console:
    """Return a console on standard output, as wide as the terminal if there is one."""
    return EnduringConsole() if sys.stdout.isatty() else EnduringConsole(width=FILE_WIDTH)
