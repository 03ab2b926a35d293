"""Where results are printed."""

import sys
from typing import Final

from rich.console import Console

FILE_WIDTH: Final = 200
"""Wide enough for every table: what reads a file or a log has no width of its own."""


def result_console() -> Console:
    """Return a console on standard output, as wide as the terminal if it is one."""
    return Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
