"""A replica's `user_config`: the settings that can change while it serves.

A key that is missing or null resets its setting to the default, so the file always shows which
settings apply.
"""

from collections.abc import Mapping
from typing import Any

from deployments.model_spec import ModelSpec

BATCH_KEYS = frozenset(
    {"max_batch_size", "batch_wait_timeout_s", "max_queued_requests", "max_queued_tokens"}
)
"""The keys of every deployment: both tokenize requests in batches and bound their queues."""


def given_settings(
    user_config: Mapping[str, float | None], known: frozenset[str]
) -> dict[str, float]:
    """Return the settings that have a value.

    Raises:
        ValueError: A key is unknown.
    """
    unknown = sorted(user_config.keys() - known)
    if unknown:
        raise ValueError(
            f"unknown keys in user_config: {', '.join(unknown)}; "
            f"known are {', '.join(sorted(known))}"
        )
    return {key: value for key, value in user_config.items() if value is not None}


def queue_limits(
    given: Mapping[str, float], spec: ModelSpec, max_model_len: int
) -> tuple[int, int | None]:
    """Return `max_queued_requests` and `max_queued_tokens`; the model entry has the defaults.

    See `ModelSpec` for what they count.

    Args:
        given: See `given_settings`.
        spec: The model's entry.
        max_model_len: The most tokens of a sequence. If the replica has chosen it, as many tokens
            may wait, so that the longest sequence can.
    """
    max_requests = given.get("max_queued_requests", spec.max_queued_requests)
    max_tokens = given.get("max_queued_tokens", spec.max_queued_tokens)
    if max_tokens is None:
        return int(max_requests), None
    least = max_model_len if spec.max_model_len is None else 0
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
