"""Reads `--config`: a YAML file with the names of the flags, or an older load tester's names.

The older tool's keys are under `pressure`. Keys without an effect here are accepted with a notice,
so old files still run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

SECTION: Final = "pressure"

_NAMES: Final = {
    "target-url": "url",
    "data-filename": "data",
    "limit": "max_inflight",
    "interval": "interval",
    "num-queues": "queues",
    "num-tasks": "loops",
    "num-users": "users",
    "duration": "duration",
}
_MODES: Final = ("count", "duration")


class ConfigFileError(ValueError):
    """A configuration file is not usable; the message names it."""


@dataclass(frozen=True, slots=True)
class FileSettings:
    """The content of a file.

    Attributes:
        settings: Values by the field names of `RunConfig`.
        notices: A sentence for each key that was ignored.
    """

    settings: dict[str, Any]
    notices: tuple[str, ...] = ()


def read_config_file(path: Path) -> FileSettings:
    """Read a file; names may be written with hyphens or underscores.

    Raises:
        ConfigFileError: The file can't be read, is not a mapping, or has an unknown older key.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigFileError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigFileError(f"{path} must hold a mapping of names to values")
    own, older = _split(content, path)
    translated = _translate(older, path)
    named = {str(key).replace("-", "_"): value for key, value in own.items()}
    return FileSettings({**translated.settings, **named}, translated.notices)


def _split(content: Mapping[Any, Any], path: Path) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Split a file into the settings by flag name and the keys of `pressure`."""
    section = content.get(SECTION) or {}
    if not isinstance(section, dict):
        raise ConfigFileError(f"{path}: {SECTION} must hold a mapping of names to values")
    older = dict(section)
    own = {}
    for key, value in content.items():
        if str(key).startswith(f"{SECTION}."):
            older[str(key).removeprefix(f"{SECTION}.")] = value
        elif key != SECTION:
            own[key] = value
    return own, older


def _translate(older: Mapping[str, Any], path: Path) -> FileSettings:
    known = [*_NAMES, "mode", "num-threads"]
    for key in older:
        if key not in known:
            raise ConfigFileError(
                f"{path}: {SECTION} has no key {key!r}; its keys are {', '.join(known)}"
            )
    # A file that has a duration and no num-tasks means the duration, even without a mode.
    is_timed = "duration" in older and "num-tasks" not in older
    mode = older.get("mode", "duration" if is_timed else "count")
    if mode not in _MODES:
        raise ConfigFileError(
            f"{path}: {SECTION}.mode must be one of {', '.join(_MODES)}, not {mode!r}"
        )
    if mode == "duration" and older.get("duration") is None:
        raise ConfigFileError(
            f"{path}: {SECTION}.mode is duration, but {SECTION}.duration is missing"
        )
    dropped = "duration" if mode == "count" else "num-tasks"
    settings = {_NAMES[key]: value for key, value in older.items() if key in _NAMES}
    settings.pop(_NAMES[dropped], None)
    return FileSettings(settings, _notices(older))


def _notices(older: Mapping[str, Any]) -> tuple[str, ...]:
    if "num-threads" not in older:
        return ()
    return (f"{SECTION}.num-threads is ignored: one event loop runs all queues at once.",)
