"""Reports wrong usage of a command: one line per mistake, and exit code 2."""

from typing import NoReturn

import typer
from pydantic import ValidationError

USAGE_ERROR = 2


def refuse(*sentences: str) -> NoReturn:
    """Print the mistakes and end the command."""
    for sentence in sentences:
        typer.echo(f"loadtest: {sentence}", err=True)
    raise typer.Exit(USAGE_ERROR)


def mistakes_of(error: ValidationError) -> list[str]:
    """Return one line per mistake: the flag, what is wrong, and the given value."""
    return [
        _line(each["loc"], each["msg"].removeprefix("Value error, "), each["input"])
        for each in error.errors()
    ]


def _line(place: tuple[int | str, ...], message: str, given: object) -> str:
    if not place:
        return message
    flag = "URL" if place[0] == "url" else f"--{str(place[0]).replace('_', '-')}"
    if message == "Field required":
        return f"{flag} is missing"
    if message.startswith(flag):
        return message
    is_quoted = not isinstance(given, str | int | float) or str(given) in message
    return f"{flag}: {message}" if is_quoted else f"{flag}: {message}, not {given!r}"
