"""`raystream`, and `python -m raystream`: the server's commands, and `bench` for the load tester's.

Only this module knows both. The load tester's commands are imported when one of them is asked for:
with numpy and plotly that takes most of a second.
"""

import sys
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from raystream import require_own_packages

try:
    require_own_packages()
except ImportError as error:
    sys.exit(f"Error: {error}")

# After the check: its own imports would fail with a traceback.
from serve_app.commands.cli import app

__all__ = ["app"]


class LoadTesterCommands(TyperGroup):
    """The commands of `loadtest`.

    Typer has a copy of click, whose types it does not hand out.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return their names."""
        return list(_load_tester().commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the one of this name, if there is one."""
        return _load_tester().commands.get(cmd_name)


def _load_tester() -> TyperGroup:
    from loadtest.cli import app as load_tester

    return get_group(load_tester)


app.add_typer(
    typer.Typer(no_args_is_help=True),
    name="bench",
    cls=LoadTesterCommands,
    help="Measure how much load a server can carry: the commands of `loadtest`.",
)

if __name__ == "__main__":
    app(prog_name="raystream")
