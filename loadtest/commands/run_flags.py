"""The flags of `loadtest run`: one for each setting of `RunConfig`, which parses their values."""

from collections.abc import Callable, Iterable, Iterator
from inspect import Parameter, Signature
from typing import Any, Final

import typer

from loadtest.config.run_config import Flag, RunConfig

PANELS: Final = {
    "queues": "Load",
    "rate": "Load at a rate",
    "data": "Questions",
    "api": "Server",
    "slo": "Results",
}
"""The panels of the help, by the setting that each begins with."""


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes any keyword the flags as its parameters, as typer reads them."""
    command.__signature__ = Signature(list(_parameters()))  # type: ignore[attr-defined]
    return command


def _parameters() -> Iterator[Parameter]:
    panel = ""
    for name, setting in RunConfig.model_fields.items():
        if name == "url":
            yield _parameter(name, str, typer.Argument(None, metavar="URL", show_default=False))
            continue
        panel = PANELS.get(name, panel)
        kind: type = str
        if setting.annotation is bool:
            kind = bool
        elif setting.annotation == tuple[str, ...]:
            kind = list[str]
        flag = next((each for each in setting.metadata if isinstance(each, Flag)), Flag())
        names = (flag.short, f"--{name.replace('_', '-')}", flag.other)
        text = " ".join(str(setting.description).split())
        yield _parameter(name, kind, _option(filter(None, names), text, panel, flag.metavar))
    text = "YAML file of settings, named like these flags."
    yield _parameter("config", str, _option(["--config"], text, panel, "run.yml"))


def _option(names: Iterable[str], text: str, panel: str, metavar: str | None) -> Any:
    return typer.Option(
        None, *names, help=text, rich_help_panel=panel, metavar=metavar, show_default=False
    )


def _parameter(name: str, kind: type, info: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=info, annotation=kind | None)
