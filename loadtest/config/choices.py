"""The settings that take one of a few names."""

from enum import StrEnum
from typing import Final


class Arrival(StrEnum):
    """The spacing of an open loop's requests."""

    POISSON = "poisson"
    CONSTANT = "constant"


class Order(StrEnum):
    """The order in which questions are asked."""

    RANDOM = "random"
    SHUFFLED = "shuffled"
    """Each question once, in random order; then all of them again in another order."""
    SEQUENTIAL = "sequential"


class GpuSampling(StrEnum):
    """The conditions for sampling this machine's GPUs."""

    AUTO = "auto"
    """Only if there is an nvidia-smi."""
    ON = "on"
    OFF = "off"


class ApiName(StrEnum):
    """The kinds of server, as `--api` names them."""

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
    """Return the API that the end of a path belongs to.

    Raises:
        ValueError: It belongs to none.
    """
    for ending, name in _BY_ENDING.items():
        if path.rstrip("/").endswith(ending):
            return name
    raise ValueError(
        f"the path {path!r} belongs to no known API: end the URL with one of "
        f"{', '.join(_BY_ENDING)}, or name the API with --api"
    )
