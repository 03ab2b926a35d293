"""A replica's `user_config`: what of a deployment changes while it serves.

A key that is left out, or null, stands for the default again, so what holds is what the file says.
"""

from collections.abc import Mapping
from typing import Any

from deployments.model_spec import ModelSpec

BATCH_KEYS = frozenset(
    {"max_batch_size", "batch_wait_timeout_s", "max_queued_requests", "max_queued_tokens"}
)
"""What every deployment takes that tokenizes together what arrives together."""


def given_settings(
    user_config: Mapping[str, float | None], known: frozenset[str]
) -> dict[str, float]:
    """Return the settings that have a value.

    Raises:
        ValueError: There is a key that is not known.
    """
    unknown = sorted(user_config.keys() - known)
    if unknown:
        raise ValueError(
            f"unknown keys in user_config: {', '.join(unknown)}; "
            f"known are {', '.join(sorted(known))}"
        )
    return {key: value for key, value in user_config.items() if value is not None}


def queue_limits(given: Mapping[str, float], spec: ModelSpec) -> tuple[int, int | None]:
    """Return the most requests and tokens that may wait; the model entry's are the defaults."""
    max_requests = given.get("max_queued_requests", spec.max_queued_requests)
    max_tokens = given.get("max_queued_tokens", spec.max_queued_tokens)
    return int(max_requests), None if max_tokens is None else int(max_tokens)


def set_batching(
    method: Any, given: Mapping[str, float], max_batch_size: int, batch_wait_timeout_s: float
) -> None:
    """Set how a `@serve.batch` method gathers calls.

    Args:
        method: Has setters that its types don't tell of.
        given: See `given_settings`.
        max_batch_size: The default.
        batch_wait_timeout_s: The default.
    """
    method.set_max_batch_size(int(given.get("max_batch_size", max_batch_size)))
    method.set_batch_wait_timeout_s(given.get("batch_wait_timeout_s", batch_wait_timeout_s))
