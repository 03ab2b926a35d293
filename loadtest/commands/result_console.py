"""Where progress and results are printed."""

import os
import sys
from typing import Final

from rich.console import Console

FILE_WIDTH: Final = 200
"""Wide enough for every table: what reads a file or a log has no width of its own."""


class EnduringConsole(Console):
    """A console whose reader may leave, as `head` does: what goes on goes on unseen."""

    def on_broken_pipe(self) -> None:
        """Print nothing from here on, where rich would end the process."""
        self.quiet = True
        # What Python flushes at its end must not fail either: that would be its exit code.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


def result_console() -> Console:
    """Return a console on standard output, as wide as the terminal if it is one."""
    return EnduringConsole() if sys.stdout.isatty() else EnduringConsole(width=FILE_WIDTH)
