"""`python -m loadtest`: the same as the command `loadtest`."""

from loadtest.cli import app

app(prog_name="loadtest")
