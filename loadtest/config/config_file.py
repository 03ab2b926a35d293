"""Reads `--config`: a YAML file with the flags' names, or with those of an older load tester.

The older one's keys stand under `pressure`. Those that mean nothing here are taken and said to be,
so that a file that has served for years still runs.
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
    """A configuration file can't be read; the message names it."""


@dataclass(frozen=True, slots=True)
class FileSettings:
    """What a file says.

    Attributes:
        settings: By the names of `RunConfig`.
        notices: Sentences on what was taken and means nothing here.
    """

    settings: dict[str, Any]
    notices: tuple[str, ...] = ()


def read_config_file(path: Path) -> FileSettings:
    """Read a file; names may be written with hyphens or underscores.

    Raises:
        ConfigFileError: It can't be read, is no mapping, or has an unknown key of the older form.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigFileError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigFileError(f"{path} holds no mapping of names to values")
    own, older = _parted(content, path)
    translated = _translated(older, path)
    named = {str(key).replace("-", "_"): value for key, value in own.items()}
    return FileSettings({**translated.settings, **named}, translated.notices)


def _parted(content: Mapping[Any, Any], path: Path) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return what stands under the flags' names, and what stands under `pressure`."""
    section = content.get(SECTION) or {}
    if not isinstance(section, dict):
        raise ConfigFileError(f"{path}: {SECTION} holds no mapping of names to values")
    older = dict(section)
    own = {}
    for key, value in content.items():
        if str(key).startswith(f"{SECTION}."):
            older[str(key).removeprefix(f"{SECTION}.")] = value
        elif key != SECTION:
            own[key] = value
    return own, older


def _translated(older: Mapping[str, Any], path: Path) -> FileSettings:
    known = [*_NAMES, "mode", "num-threads"]
    for key in older:
        if key not in known:
            raise ConfigFileError(f"{path}: {SECTION} has no {key!r}; it has {', '.join(known)}")
    # Without a mode a file with nothing but a duration means it.
    is_timed = "duration" in older and "num-tasks" not in older
    mode = older.get("mode", "duration" if is_timed else "count")
    if mode not in _MODES:
        raise ConfigFileError(f"{path}: {SECTION}.mode is one of {', '.join(_MODES)}, not {mode!r}")
    if mode == "duration" and older.get("duration") is None:
        raise ConfigFileError(
            f"{path}: {SECTION}.mode is duration, and {SECTION}.duration is missing"
        )
    dropped = "duration" if mode == "count" else "num-tasks"
    settings = {_NAMES[key]: value for key, value in older.items() if key in _NAMES}
    settings.pop(_NAMES[dropped], None)
    return FileSettings(settings, _notices(older))


def _notices(older: Mapping[str, Any]) -> tuple[str, ...]:
    if "num-threads" not in older:
        return ()
    return (
        f"{SECTION}.num-threads means nothing here: one event loop carries all queues, and all of "
        "them run at once.",
    )
