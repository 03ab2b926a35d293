"""A replica's `user_config`: the settings that can change while it serves.

A key that is missing or null resets its setting to the default, so the file always shows which
settings apply. `raystream check` accepts the same keys and values.
"""

from collections.abc import Mapping
from math import inf
from typing import Any, Final

from deployments.contract.model_spec import ModelConfig

LEAST: Final[Mapping[str, int]] = {
    "max_batch_size": 1,
    "batch_wait_timeout_s": 0,
    "max_queued_requests": 0,
    "max_queued_tokens": 0,
}
"""The keys of every deployment, with their least values: both kinds of replica tokenize requests in
batches and bound their queues. All but the time are whole numbers."""


def given_settings(user_config: object) -> dict[str, float]:
    """Return the settings that have a value.

    Args:
        user_config: As in the file, which Serve passes on unread.

    Raises:
        ValueError: It is no mapping, a key is unknown, or a value is wrong; one line says which.
    """
    if not isinstance(user_config, Mapping):
        raise ValueError(f"it must be a mapping, and is {user_config!r}")
    unknown = sorted(str(key) for key in user_config if key not in LEAST)
    if unknown:
        raise ValueError(
            f"unknown keys: {', '.join(unknown)}; known are {', '.join(sorted(LEAST))}"
        )
    given = {key: value for key, value in user_config.items() if value is not None}
    return {key: _number(key, value) for key, value in given.items()}


def _number(key: str, value: object) -> float:
    """Return a setting's value, which must be a number, not one in quotes."""
    is_count = not key.endswith("_s")
    numbers = int if is_count else int | float
    if isinstance(value, numbers) and not isinstance(value, bool) and LEAST[key] <= value < inf:
        return value
    kind = "a whole number" if is_count else "a number"
    raise ValueError(f"{key} must be {kind} of at least {LEAST[key]}, and is {value!r}")


def queue_limits(
    given: Mapping[str, float], entry: ModelConfig, max_model_len: int
) -> tuple[int, int | None]:
    """Return `max_queued_requests` and `max_queued_tokens`; the model entry has the defaults.

    Args:
        given: See `given_settings`.
        entry: The model's entry.
        max_model_len: The most tokens of a sequence. If the replica has chosen it, as many tokens
            may wait, so that the longest sequence can.
    """
    max_requests = given.get("max_queued_requests", entry.max_queued_requests)
    max_tokens = given.get("max_queued_tokens", entry.max_queued_tokens)
    if max_tokens is None:
        return int(max_requests), None
    least = max_model_len if entry.max_model_len == "auto" else 0
    return int(max_requests), max(int(max_tokens), least)


def set_batching(
    method: Any, given: Mapping[str, float], max_batch_size: int, batch_wait_timeout_s: float
) -> None:
    """Set how a `@serve.batch` method collects calls into batches.

    Args:
        method: The decorated method; Ray's types hide its setters.
        given: See `given_settings`.
        max_batch_size: The default of this key.
        batch_wait_timeout_s: The default of this key.
    """
    method.set_max_batch_size(int(given.get("max_batch_size", max_batch_size)))
    method.set_batch_wait_timeout_s(given.get("batch_wait_timeout_s", batch_wait_timeout_s))
