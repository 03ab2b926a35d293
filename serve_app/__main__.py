"""`python -m serve_app` is the command line `raystream`."""

from serve_app.commands.cli import app

app(prog_name="raystream")
