"""A configuration as it stands in the results: with its defaults, without its secrets."""

from typing import Any

from loadtest.config import RunConfig
from loadtest.load.plans import DEFAULT_QUEUES, plans_of
from loadtest.redaction import redacted_body, redacted_headers, redacted_url


def published_config(config: RunConfig, model: str | None) -> dict[str, Any]:
    """Return all of it.

    Args:
        config: What was asked for.
        model: What the server was asked for, found out or told.
    """
    plan = plans_of(config)[0]
    return {
        **config.model_dump(mode="json"),
        "url": redacted_url(config.url),
        "body": redacted_body(config.body),
        "header": redacted_headers(config.header),
        "api": str(config.resolved_api()),
        "model": model,
        "queues": None if config.rate is not None else list(config.queues or DEFAULT_QUEUES),
        "loops": plan.num_loops,
        "requests": plan.num_requests,
    }
