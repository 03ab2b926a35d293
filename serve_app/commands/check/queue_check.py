"""Part of `raystream check`: Ray's own queue limits must not apply before ours do.

A request beyond Ray's limits waits in a router that polls, or is refused by each ingress replica on
its own. So a model's deployment must accept every request that the model admits, and some more for
the model to refuse.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from deployments.contract.model_spec import ModelConfig
from serve_app.config import AppConfig


def ingress_queue_problems(
    deployment: Mapping[str, Any], config: AppConfig, path: str
) -> Iterator[str]:
    """Yield the mistakes in the queue settings of the ingress's deployment."""
    max_ongoing = deployment.get("max_ongoing_requests")
    if _is_number(max_ongoing) and max_ongoing < config.ongoing_requests:
        yield (
            f"{path}.max_ongoing_requests: {max_ongoing} is less than {config.ongoing_requests}, "
            "what the models admit together plus a margin for refused requests; others would wait "
            "in front of the ingress, or be refused by Ray with a message of its own"
        )


def queue_problems(
    deployment: Mapping[str, Any], model: ModelConfig, user_config: Mapping[str, Any], path: str
) -> Iterator[str]:
    """Yield the mistakes in the queue settings of a model's deployment.

    Args:
        deployment: The deployment's section.
        model: The model's entry.
        user_config: The section's `user_config`, already checked.
        path: The section's path in the file.
    """
    max_ongoing = deployment.get("max_ongoing_requests")
    if _is_number(max_ongoing):
        yield from _ongoing_problems(max_ongoing, model, user_config, path)
    if deployment.get("max_queued_requests", -1) != -1:
        yield (
            f"{path}.max_queued_requests: Ray counts these in each ingress replica separately; "
            "leave it out, and set max_queued_requests in the model's entry or in user_config"
        )
    max_tokens = user_config.get("max_queued_tokens")
    if max_tokens is not None and model.has_too_few_tokens(max_tokens):
        yield f"{path}.user_config.max_queued_tokens: {model.too_few_tokens_message(max_tokens)}"


def _ongoing_problems(
    max_ongoing: int, model: ModelConfig, user_config: Mapping[str, Any], path: str
) -> Iterator[str]:
    batch_size = user_config.get("max_batch_size")
    if batch_size and max_ongoing < batch_size:
        yield (
            f"{path}.max_ongoing_requests: {max_ongoing} is less than user_config.max_batch_size "
            f"({batch_size}), so no batch could ever be full"
        )
    needed = model.ongoing_requests(user_config.get("max_queued_requests"))
    if max_ongoing < needed:
        yield (
            f"{path}.max_ongoing_requests: {max_ongoing} is less than {needed}: running requests, "
            "queued ones (max_queued_requests) and a margin for refused ones; Ray's router would "
            "hold requests back before the model can refuse them"
        )


def _is_number(value: object) -> TypeGuard[int]:
    """Return whether a limit is a positive integer; Ray's own schema reports any other value."""
    return isinstance(value, int) and value > 0
