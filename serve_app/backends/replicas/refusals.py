"""Requests that are offered to several replicas, one after the other, while these refuse them."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from deployments.contract.errors import ModelChangedError, OverloadedError
from deployments.contract.generation import Refused
from serve_app.backends.replicas.admission_queue import FullError
from serve_app.backends.replicas.running_replicas import RunningReplicas

T = TypeVar("T")

MAX_ATTEMPTS = 3
"""The most replicas that a request is offered to."""


def raise_refusal(answer: object, refused_by: set[str] | None = None) -> None:
    """Raise the error of a replica's refusal; do nothing at another answer.

    Args:
        answer: The replica's.
        refused_by: Gets the id of a replica that has refused.

    Raises:
        InvalidRequestError: The client has to fix the request.
        FullError: The replica has no room for any request.
        OverloadedError: It has no room for this request.
        ModelChangedError: It is another version than the request needs.
    """
    if not isinstance(answer, Refused):
        return
    if refused_by is not None:
        refused_by.add(answer.replica_id)
    error = answer.error
    if answer.is_full and isinstance(error, OverloadedError):
        raise FullError(error.message, error.retry_after_s, error.reason, answer.replica_id)
    raise error


async def until_taken(call: Callable[[set[str]], Awaitable[T]], running: RunningReplicas) -> T:
    """Make a call, and repeat it while replicas refuse it, once for each that takes requests.

    The router may pick a full replica while another has room, since each ingress learns late about
    the load from other ingresses. So each further call says which replicas have refused.

    Args:
        call: Gets the ids of the replicas that have refused. It asks another one while there is
            one, and raises a refusal with `raise_refusal`, which adds to the ids.
        running: The model's replicas, as the router knows them.

    Raises:
        FullError: All replicas are full. It carries the shortest wait of their refusals.
        OverloadedError: All replicas that were asked refused. Also with the shortest wait.
        ModelChangedError: They are all of another version than the request needs.
    """
    refusals: list[OverloadedError] = []
    others: list[ModelChangedError] = []
    refused_by: set[str] = set()
    while True:
        try:
            return await call(refused_by)
        except OverloadedError as error:
            refusals.append(error)
        except ModelChangedError as error:
            others.append(error)
        # One that has refused and left leaves the others to be asked.
        if len(refusals) + len(others) >= min(MAX_ATTEMPTS, len(running.open_ids | refused_by)):
            raise _summary(refusals, running.open_ids) if refusals else others[-1]


def _summary(refusals: Sequence[OverloadedError], open_ids: frozenset[str]) -> OverloadedError:
    """Return the refusal with the shortest wait; `FullError` only if all replicas are full."""
    full = {refusal.replica_id for refusal in refusals if isinstance(refusal, FullError)}
    least = min(refusals, key=lambda refusal: refusal.retry_after_s or 0)
    return least if full and open_ids <= full else OverloadedError(*least.args)
