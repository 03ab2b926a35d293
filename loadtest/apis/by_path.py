"""The kinds of server by their names and by the paths of their URLs."""

from enum import StrEnum
from typing import Final


class ApiName(StrEnum):
    """What `--api` takes."""

    AUTO = "auto"
    OPENAI_CHAT = "openai-chat"
    OPENAI_COMPLETIONS = "openai-completions"
    TEXT_GENERATION = "text-generation"
    CLASSIFY = "classify"
    CUSTOM = "custom"


_BY_ENDING: Final = {
    "/chat/completions": ApiName.OPENAI_CHAT,
    "/completions": ApiName.OPENAI_COMPLETIONS,
    "/text-generation": ApiName.TEXT_GENERATION,
    "/classify": ApiName.CLASSIFY,
}


def api_of_path(path: str) -> ApiName:
    """Return the API whose path this one ends with.

    Raises:
        ValueError: It ends with none.
    """
    for ending, name in _BY_ENDING.items():
        if path.rstrip("/").endswith(ending):
            return name
    raise ValueError(
        f"no API is known by the path {path!r}: let the URL end with {', '.join(_BY_ENDING)}, or "
        "say which it is with --api"
    )
